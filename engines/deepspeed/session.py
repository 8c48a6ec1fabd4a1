"""What DeepSpeed's pipeline and its plain engine have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from engines.deepspeed import library
from engines.deepspeed.config import Config
from harness.interfaces import Model, SessionSpec
from harness.plan import Plan
from harness.rank_session import Mark, RankSession
from harness.stage_module import StageModule

if TYPE_CHECKING:
    from engines.deepspeed.state import State


class DeepSpeedSession(RankSession):
    """A rank with one stage. `forward_end` is when its last forward pass, or recomputation, ended."""

    stage: StageModule
    state: State
    forward_end: Mark

    def __init__(self, model: Model, plan: Plan, spec: SessionSpec, config: Config) -> None:
        super().__init__(model, plan, spec)
        self.config = config
        self.library = library.load(config.zero)

    def own(self, stage: StageModule) -> None:
        """Take the stage that this rank trains."""
        self.stage = stage
        stage.autocast = self.autocast_dtype
        stage.recomputes = self.plan.recompute == "always"
        stage.register_forward_hook(self._forward_ends, always_call=True)

    def _forward_ends(self, *_: Any) -> None:
        self.forward_end = self.now()

    def held(self) -> list[Tensor]:
        return self.state.held()

    def local_state(self) -> dict[str, Any]:
        return self.state.save()

    def load_local(self, state: dict[str, Any]) -> None:
        self.state.load(state)
