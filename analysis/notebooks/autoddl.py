# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # AutoDDL
#
# Each matmul is split over p0 x p1 x p2 devices: its batch, its output features and its input features. A search
# finds the strategies that communicate least; here the optimum is proven. Piz Daint and Google Cloud are simulated,
# collectives and orders measured in small.

# %%
from analysis import paper_pages

autoddl = paper_pages.report("autoddl")
print("\n".join(autoddl.messages))

# %% [markdown]
# ## Methods
#
# What a method communicates and stores for a matmul, by the paper's formulas and by our search.

# %%
autoddl.tables("Table 1")

# %% [markdown]
# ## An attention layer

# %%
autoddl.tables("Fig. 3")

# %%
autoddl.picture("autoddl_fig3")

# %% [markdown]
# ## Do formulas predict how long collectives take?

# %%
autoddl.tables("Table 2")

# %%
autoddl.tables("Fig. 4")

# %%
autoddl.picture("autoddl_fig4")

# %% [markdown]
# ## What the search finds

# %%
autoddl.tables("Fig. 7")

# %%
autoddl.picture("autoddl_fig7")

# %% [markdown]
# ## How fast it finds it

# %%
autoddl.tables("Fig. 8")

# %%
autoddl.picture("autoddl_fig8")

# %% [markdown]
# ## Schemes on two clusters

# %%
autoddl.tables("Fig. 9")

# %%
autoddl.picture("autoddl_fig9")

# %%
autoddl.tables("Fig. 10")

# %%
autoddl.picture("autoddl_fig10")

# %% [markdown]
# ## With pipeline stages

# %%
autoddl.tables("Table 3")

# %% [markdown]
# ## Verdicts

# %%
autoddl.claims()
