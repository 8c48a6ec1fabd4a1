# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # torchgpipe
#
# Pipeline parallelism with micro-batches and checkpoints, driven by PyTorch's own autograd (arXiv 2004.09910). Each
# table has three columns: what the paper prints, what Regatta simulates at the paper's scale (eight Tesla P40), what
# it measures in small on CPU devices. Records are those committed in `analysis/results/records`, and newer ones in
# `runs/`.

# %%
from analysis import paper_pages

torchgpipe = paper_pages.report("torchgpipe")
print("\n".join(torchgpipe.messages))

# %% [markdown]
# ## What each component adds
#
# Fork and join keep recomputations in order, copy streams let copies overlap, portals send skips straight to where
# they are needed. The simulation says otherwise than the paper of the first: without the dependency our recomputations
# fill idle time.

# %%
torchgpipe.tables("Table 1")

# %%
torchgpipe.picture("torchgpipe_table1")

# %% [markdown]
# The timelines of the four rows are the paper's Figure 7.

# %%
torchgpipe.picture("torchgpipe_fig7")

# %% [markdown]
# ## Speed of AmoebaNet-D
#
# More micro-batches make the bubble smaller, more stages larger.

# %%
torchgpipe.tables("Table 2")

# %%
torchgpipe.picture("torchgpipe_table2")

# %% [markdown]
# ## Memory of U-Net
#
# Stages share the parameters, checkpoints the activations: larger models fit.

# %%
torchgpipe.tables("Table 3")

# %% [markdown]
# ## Speed of U-Net

# %%
torchgpipe.tables("Table 4")

# %%
torchgpipe.picture("torchgpipe_table4")

# %% [markdown]
# ## Verdicts

# %%
torchgpipe.claims()
