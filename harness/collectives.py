"""torch's collectives under the names that its release has: those of 2.13 first, the older ones warn there."""

from __future__ import annotations

import torch.distributed as dist

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_to_all = dist.all_to_all_single
