"""An engine that does nothing: what is left is weighin's own cost per token and per run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weighin.engines import Engine, OnToken, Sampling, Settings, SnippetPrompt

if TYPE_CHECKING:
    from weighin.machine import Machine
    from weighin.model import Model
    from weighin.plan import Contender


class NullEngine(Engine):
    name = "null"
    title = "nothing, to weigh the scales"
    precisions = ("none",)
    hidden = True

    @classmethod
    def contenders(cls, machine: Machine, model: Model) -> list[str]:
        return []

    @classmethod
    def settings(cls, contender: Contender, machine: Machine, model: Model) -> Settings:
        return Settings(hardware="none", quantization="none", dtype="none", device_map="cpu", dependencies=())

    @classmethod
    def weight_bytes(cls, contender: Contender, settings: Settings, model: Model) -> int:
        return 0

    @classmethod
    def snippet(
        cls, contender: Contender, settings: Settings, path: str, prompt: SnippetPrompt, cap: int, stop_ids: list[int]
    ) -> str:
        return "pass\n"

    def import_packages(self) -> None:
        pass

    def load(self) -> None:
        pass

    def generate(
        self,
        ids: Sequence[int],
        n: int,
        stop_ids: Sequence[int],
        on_token: OnToken,
        sampling: Sampling | None = None,
    ) -> list[int]:
        new = []
        for _ in range(n):
            new.append(0)
            on_token(0)
        return new


ENGINE = NullEngine
