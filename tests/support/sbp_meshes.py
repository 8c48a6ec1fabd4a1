"""Meshes of one and of several nodes, and a strategy of hypothesis that draws one."""

from __future__ import annotations

from hypothesis import strategies as st

from engines.sbp.block_layout import Mesh
from harness.sbp.device_grid import Grid

MESHES = [Mesh(Grid(*sizes)) for sizes in ((1, 1), (1, 2), (1, 6), (1, 8), (2, 4), (3, 4), (4, 1))]


meshes = st.sampled_from(MESHES)
