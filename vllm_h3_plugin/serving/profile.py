# SPDX-License-Identifier: Apache-2.0
"""Launch profiles: what a kind of machine needs to serve H3, as TOML files in ``launch/profiles``."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from vllm_h3_plugin.data import data_path
from vllm_h3_plugin.errors import SettingsError, UsageError


class Profile(BaseModel):
    """One launch profile. Every key is optional but ``description``; flags of ``vllm-h3 serve`` win over it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    description: str
    checkpoint: Path | None = Field(default=None, description="Checkpoint folder (the FL2VA or Ref2VA folder itself).")
    recipe: str = Field(default="fp8", description="Precision recipe: a name from quant/ or a path.")
    reference: bool = Field(default=False, description="Run on the CPU reference platform.")
    address: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=1, le=65535, description="TCP port.")
    task: Literal["auto", "t2va", "fl2va", "ref2va", "combined"] = Field(
        default="auto", description="Host's --task-type."
    )
    executor: Literal["auto", "uni", "mp", "ray"] = Field(
        default="auto",
        description="uni: API, engine and worker in one process; mp: one worker process a device; ray: one a node of a "
        "Ray cluster.",
    )
    devices: int = Field(default=1, ge=1, description="Number of accelerators (ranks).")
    accelerator: Literal["cuda", "npu"] = Field(
        default="cuda", description="What the devices are: cuda or npu (Ascend)."
    )
    roles: str | dict[str, tuple[int, ...]] | None = Field(
        default=None,
        description="Which cards each part is on: one, two, two-resident, four, all, or part -> cards under [roles]. "
        "Unset with several devices: all.",
    )
    card_gib: float = Field(default=64.0, gt=0, description="GiB of memory of one card, where the profile has roles.")
    resident: Literal["all", "stage"] = Field(
        default="all",
        description="Weights that stay on the device between stages: all, or those of the stage that runs.",
    )
    attention: str | None = Field(default=None, description="Attention backend by name; unset: the platform's choice.")
    lora: Path | None = Field(
        default=None, description="Adapter that is loaded at start: a Turbo, FlashGen, PEFT or FastH3 file or folder."
    )
    adapter: Literal["turbo", "fasth3", "flashgen"] | None = Field(
        default=None, description="Kind of adapter that the profile is for; a start without one is refused."
    )
    eager: bool = Field(default=False, description="The host's --enforce-eager: nothing is compiled or warmed.")
    ready_timeout_s: int = Field(default=1800, ge=1, description="Seconds to wait for the server to become ready.")
    request_timeout_s: int = Field(
        default=3600,
        ge=1,
        description="Seconds that a request may take at least; twice what its own steps predict, if that is longer.",
    )

    @field_validator("roles", mode="before")
    @classmethod
    def _roles_are_a_name_or_lists(cls, value: object) -> object:
        """Numbers as they stand: ``true`` would be card 1, and the union's own messages speak of its first member."""
        if value is None or isinstance(value, str):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"{value!r} is neither the name of a map nor a table of part = [CARDS]")
        for part, cards in value.items():
            listed = isinstance(cards, Sequence) and not isinstance(cards, str)
            if not listed or any(type(card) is not int for card in cards):
                raise ValueError(f"{part} is {cards!r}, and a part has a list of card numbers, such as {part} = [0]")
        return value

    def with_flags(self, flags: Mapping[str, object]) -> Profile:
        """This profile with some keys replaced, checked.

        Raises:
            UsageError: a value that its key cannot take; names the flag.
        """
        try:
            return Profile.model_validate({**self.model_dump(), **flags})
        except ValidationError as exc:
            first = exc.errors()[0]
            key = str(first["loc"][0])
            what = Profile.model_fields[key].description or ""
            raise UsageError(f"--{key} {flags.get(key)}", why=str(first["msg"]), fix=what) from exc


def profile_names() -> list[str]:
    """Names of the profiles that come with the project."""
    return sorted(path.stem for path in (data_path("launch") / "profiles").glob("*.toml"))


def load_profile(name_or_path: str) -> Profile:
    """Read a profile by name (``spark``) or path (``my.toml``).

    Raises:
        UsageError: no such profile; the nearest name is suggested.
        SettingsError: malformed TOML, an unknown key, or a value of the wrong type; names file and key.
    """
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = data_path("launch") / "profiles" / f"{name_or_path}.toml"
    if path.exists() and not path.is_file():
        # A pipe would be waited for without end.
        raise UsageError(
            f"profile {path} is no file", why="it is a folder, a pipe or a device", fix="Give a TOML file."
        )
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        near = difflib.get_close_matches(name_or_path, profile_names(), n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise UsageError(
            f"no launch profile or checkpoint folder {name_or_path!r}",
            why=str(exc.strerror or exc),
            fix=f"{hint}Profiles: {', '.join(profile_names())}. A checkpoint is given as its folder.",
        ) from exc
    except UnicodeDecodeError as exc:
        raise SettingsError(
            f"launch profile {path} is not valid TOML", why=f"it is not UTF-8: {exc}", fix="Save it as UTF-8."
        ) from exc
    try:
        return Profile.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as exc:
        raise SettingsError(f"launch profile {path} is not valid TOML", why=str(exc)) from exc
    except ValidationError as exc:
        first = exc.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        field = Profile.model_fields.get(str(first["loc"][0]))
        raise SettingsError(
            f"launch profile {path}: {key}",
            why=str(first["msg"]).removeprefix("Value error, "),
            fix=(field and field.description) or f"Known keys: {', '.join(sorted(Profile.model_fields))}.",
        ) from exc
