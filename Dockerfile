# SPDX-License-Identifier: Apache-2.0
# The pinned host of launch/image.lock with this plugin in it. Built by `python -m tools.image build`, which reads the
# base from the lock: both parts are required, and a name without its digest cannot be expressed here.
ARG BASE_NAME
ARG BASE_DIGEST

# --- the wheel, from exactly what .dockerignore lets in
FROM ${BASE_NAME}@${BASE_DIGEST} AS wheel
# hadolint ignore=DL3002
USER 0
ARG SOURCE_DATE_EPOCH
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY quant quant
COPY launch launch
COPY vllm_h3_plugin vllm_h3_plugin
# A wheel keeps permissions: those of the checkout depend on who cloned it. setuptools is the host's.
RUN chmod -R u=rwX,go=rX . \
    && python3 -m pip wheel --no-deps --no-build-isolation --no-index --no-cache-dir --wheel-dir /wheels .

# --- the host with the plugin, and nothing of the host replaced
FROM ${BASE_NAME}@${BASE_DIGEST} AS installed
USER 0
ARG SOURCE_DATE_EPOCH
# "1" adds Ray, 200 MB that one machine has no use for and need not be exposed to. See docs/CLUSTER.md.
ARG CLUSTER
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore
# Every file that this step writes gets the commit's time, so that the same commit gives the same layer. The last pip
# installs nothing: it fails, by name, if the plugin needs a package that is not here.
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    --mount=type=bind,source=requirements/image.txt,target=/image.txt \
    --mount=type=bind,source=requirements/cluster.txt,target=/cluster.txt \
    touch /begun \
    && for lock in /image.txt ${CLUSTER:+/cluster.txt}; do \
        python3 -m pip install --no-deps --no-cache-dir --break-system-packages --require-hashes -r "${lock}" || exit 1; \
    done \
    && python3 -m pip install --no-deps --no-cache-dir --break-system-packages --no-index /wheels/*.whl \
    && for wheel in /wheels/*.whl; do printf '%s\n' "${wheel}${CLUSTER:+[cluster]}"; done > /wanted.txt \
    && python3 -m pip install --dry-run --no-index --no-cache-dir --break-system-packages --requirement /wanted.txt \
    && rm /wanted.txt \
    && printf 'h3:x:10001:10001:vllm-h3-plugin:/var/lib/vllm-h3/home:/usr/sbin/nologin\n' >> /etc/passwd \
    && printf 'h3:x:10001:\n' >> /etc/group \
    && install -d -m 0755 /usr/share/vllm-h3 \
    && install -d -m 0750 -o 10001 -g 10001 \
        /var/cache/vllm-h3 /var/lib/vllm-h3 /var/lib/vllm-h3/clips /var/lib/vllm-h3/home \
    && find / -xdev -newer /begun ! -path '/proc/*' ! -path '/sys/*' \
        -exec touch --no-dereference --date="@${SOURCE_DATE_EPOCH:-0}" {} + \
    && rm /begun && touch --date="@${SOURCE_DATE_EPOCH:-0}" /
ENV HOME=/var/lib/vllm-h3/home \
    H3_CACHE_DIR=/var/cache/vllm-h3 \
    VLLM_OMNI_SERVER_STORAGE__PATH=/var/lib/vllm-h3/clips \
    VLLM_CACHE_ROOT=/var/lib/vllm-h3/home/.cache/vllm \
    TORCHINDUCTOR_CACHE_DIR=/var/lib/vllm-h3/home/.cache/torchinductor \
    HF_HUB_OFFLINE=1 \
    VLLM_NO_USAGE_STATS=1
WORKDIR /var/lib/vllm-h3/home
USER 10001:10001

# --- the five contracts, in a stage of their own: what they leave behind is in no layer of the image
FROM installed AS checked
RUN vllm-h3 doctor --reference
ARG SOURCE_DATE_EPOCH
ARG BASE_NAME
ARG BASE_DIGEST
ARG VERSION
ARG REVISION
ARG LOCK_SHA256
RUN mkdir /tmp/record \
    && printf '{"version": "%s", "revision": "%s", "base": "%s", "image_lock_sha256": "%s", "source_date_epoch": %s}\n' \
        "${VERSION}" "${REVISION}" "${BASE_NAME}@${BASE_DIGEST}" "${LOCK_SHA256}" "${SOURCE_DATE_EPOCH:-0}" \
        > /tmp/record/build.json \
    && vllm-h3 provenance --sbom /tmp/record/sbom.cdx.json >/dev/null

FROM installed
ARG SOURCE_DATE_EPOCH
USER 0
# Taken from the stage above, so that an image cannot exist whose contracts did not hold. RUN and not COPY: the folder
# gets the commit's time as well.
RUN --mount=type=bind,from=checked,source=/tmp/record,target=/record \
    install -m 0444 /record/build.json /record/sbom.cdx.json /usr/share/vllm-h3/ \
    && touch --date="@${SOURCE_DATE_EPOCH:-0}" /usr/share/vllm-h3/*.json /usr/share/vllm-h3
USER 10001:10001
ARG BASE_NAME
ARG BASE_DIGEST
ARG VERSION
ARG REVISION
ARG LOCK_SHA256
ARG CREATED
LABEL org.opencontainers.image.title="vllm-h3-plugin" \
      org.opencontainers.image.description="vLLM-Omni with vllm-h3-plugin; holds no model weights and no model code" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.base.name="${BASE_NAME}" \
      org.opencontainers.image.base.digest="${BASE_DIGEST}" \
      vllm-h3.image-lock.sha256="${LOCK_SHA256}"
EXPOSE 8000
STOPSIGNAL SIGTERM
ENTRYPOINT ["vllm-h3", "serve"]
CMD ["--help"]
