# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # MadPipe
#
# Which layers on which device, and in which pattern, when memory is short: plans only, on stored profiles. MadPipe's
# devices may have stages from both ends of the network; PipeDream's plans are consecutive, and come from an estimate
# of memory that may be wrong.

# %%
from analysis import paper_pages

madpipe = paper_pages.report("madpipe")
print("\n".join(madpipe.messages))

# %% [markdown]
# ## Periods of ResNet-50 against memory
#
# Where memory is short, what a first phase hopes for and what a schedule can keep are far apart.

# %%
madpipe.tables("Fig. 6")

# %%
madpipe.picture("madpipe_fig6")

# %% [markdown]
# ## Four networks

# %%
madpipe.tables("Fig. 7")

# %%
madpipe.picture("madpipe_fig7")

# %%
madpipe.tables("Instances without a plan")

# %% [markdown]
# ## Speed-ups

# %%
madpipe.tables("Fig. 8")

# %%
madpipe.picture("madpipe_fig8")

# %% [markdown]
# ## Verdicts

# %%
madpipe.claims()
