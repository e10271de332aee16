# SPDX-License-Identifier: Apache-2.0
"""What Prometheus is told about jobs, on the host's own ``/metrics``."""

from __future__ import annotations

from functools import cache

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from vllm_h3_plugin.serving.jobs.job import Job
from vllm_h3_plugin.serving.jobs.made import Observer

_SECONDS = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1200, 2400, 4800)


class JobMetrics(Observer):
    """Counts jobs. One for each registry."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        """
        Args:
            registry: the host's is the default one.
        """
        self._queue = Gauge("h3_queue_length", "Clips that wait", registry=registry, multiprocess_mode="livesum")
        self._running = Gauge(
            "h3_jobs_running", "Clips that are being made", registry=registry, multiprocess_mode="livesum"
        )
        self._wait = Histogram(
            "h3_queue_wait_seconds", "Seconds that a job waited", buckets=_SECONDS, registry=registry
        )
        self._jobs = Counter("h3_jobs", "Jobs that ended, by status", ["status"], registry=registry)
        self._failures = Counter("h3_job_failures", "Jobs without a clip, by reason", ["reason"], registry=registry)
        self._cancels = Counter("h3_job_cancels", "Jobs that were cancelled", registry=registry)
        self._run = Histogram("h3_job_seconds", "Seconds from start to clip", buckets=_SECONDS, registry=registry)
        self._phase = Histogram(
            "h3_phase_seconds", "Seconds that a phase of a job took", ["phase"], buckets=_SECONDS, registry=registry
        )
        self._steps = Counter("h3_denoise_steps", "Denoise steps done", registry=registry)
        self._step_seconds = Counter("h3_denoise_seconds", "Seconds spent in denoise steps", registry=registry)
        self._rate = Gauge(
            "h3_denoise_steps_per_second",
            "Steps a second of the last job",
            registry=registry,
            multiprocess_mode="mostrecent",
        )
        self._tokens = Counter("h3_denoise_tokens", "Packed tokens times steps", registry=registry)
        self._peak = Gauge(
            "h3_peak_memory_bytes",
            "Most that the device's allocator has handed out since the server started",
            registry=registry,
            multiprocess_mode="max",
        )

    def line(self, length: int) -> None:
        """The line has this length now."""
        self._queue.set(length)

    def started(self, job: Job) -> None:
        """A job left the line."""
        self._running.inc()
        self._wait.observe(max(0.0, (job.started_at or job.created_at) - job.created_at))

    def ended(self, job: Job) -> None:
        """A job ended."""
        if job.started_at is not None:
            self._running.dec()
        self._jobs.labels(job.status.value).inc()
        if job.failure is not None:
            (self._cancels if job.failure.code == "cancelled" else self._failures.labels(job.failure.code)).inc()
        else:
            self._run.observe(float(job.ledger.get("run_s") or 0.0))
        self._told(job)

    def _told(self, job: Job) -> None:
        ledger = job.ledger
        for phase, seconds in (ledger.get("phases") or {}).items():
            self._phase.labels(phase).observe(seconds)
        for name, phase in (("encode_s", "encoding video"), ("save_s", "saving")):
            if ledger.get(name) is not None:
                self._phase.labels(phase).observe(ledger[name])
        steps = ledger.get("steps_s") or []
        if steps:
            self._steps.inc(len(steps))
            self._step_seconds.inc(sum(steps))
            self._rate.set(len(steps) / max(sum(steps), 1e-9))
            self._tokens.inc(len(steps) * int(ledger.get("tokens") or 0))
        if ledger.get("peak_memory_bytes"):
            self._peak.set(ledger["peak_memory_bytes"])


@cache
def host_metrics() -> JobMetrics:
    """The one of this process, on the host's registry, which takes each name once."""
    return JobMetrics()
