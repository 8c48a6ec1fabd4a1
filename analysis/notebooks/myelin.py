# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Myelin
#
# A pipeline whose stages run the tasks whose messages have arrived, with replicas, an optimizer whose state is on the
# host, and all-reduces that overlap with updates (published later as AxoNN). The paper's scale is Summit: 8 to 64
# nodes of six V100; Regatta simulates it, and measures the same mechanisms in small.

# %%
from analysis import paper_pages

myelin = paper_pages.report("myelin")
print("\n".join(myelin.messages))

# %% [markdown]
# ## The models

# %%
myelin.tables("Table I")

# %% [markdown]
# ## How many stages?
#
# Fewer stages have less to send and a smaller bubble.

# %%
myelin.tables("Fig. 5")

# %%
myelin.picture("myelin_fig5")

# %% [markdown]
# ## The memory optimization makes fewer stages possible
#
# 20 bytes a parameter become 4, and 16 for each of a bucket's.

# %%
myelin.tables("Fig. 6")

# %%
myelin.picture("myelin_fig6")

# %% [markdown]
# ## Sums and updates in chunks

# %%
myelin.tables("Fig. 8")

# %%
myelin.picture("myelin_fig8")

# %% [markdown]
# ## Losses are those of one device

# %%
myelin.tables("Fig. 9")

# %%
myelin.picture("myelin_fig9")

# %% [markdown]
# ## Which configuration is the fastest?

# %%
myelin.tables("Table II")

# %% [markdown]
# ## Weak and strong scaling

# %%
myelin.tables("Fig. 10")

# %%
myelin.picture("myelin_fig10")

# %%
myelin.tables("Fig. 11")

# %%
myelin.picture("myelin_fig11")

# %% [markdown]
# ## What brings what
#
# The paper shows its mechanisms together. One by one, the message-driven order alone brings nothing over 1F1B; a
# larger limit, messages that do not block, fewer stages and overlap do.

# %%
myelin.tables("What brings what")

# %% [markdown]
# ## Verdicts

# %%
myelin.claims()
