"""Savings of AutoDDL against the second best that the paper prints: in percent, of a step and of its communication."""

from __future__ import annotations

from analysis.autoddl.fig9_fig10 import Setting
from analysis.paper_data import value

FILES = {"fig9": "autoddl_fig9_piz_daint", "fig10": "autoddl_fig10_google_cloud"}
"""Files of the paper's numbers, by sweep."""
MODELS = {
    "vgg13": "VGG13",
    "gpt_6_8b": "Transformer 6.8B",
    "gpt_16_5b": "Transformer 16.5B",
    "gpt_35_8b": "Transformer 35.8B",
    "gpt_24_1024": "Transformer small 0.35B",
    "gpt_28_4096": "Transformer large 5.8B",
}
"""Names of the models in the paper."""


def step_saving(setting: Setting) -> float | None:
    """Return the saving of the step time that the paper prints; None if it prints none."""
    return _printed(setting, "end_to_end_saved")


def communication_saving(setting: Setting) -> float | None:
    """Return the saving of communication that the paper prints; None if it prints none."""
    own = _printed(setting, "communication_saved")
    return _printed(setting, "communication_time_saved") if own is None else own


def _printed(setting: Setting, metric: str) -> float | None:
    return value(FILES[setting.sweep], metric, model=MODELS[setting.model], devices=setting.devices)
