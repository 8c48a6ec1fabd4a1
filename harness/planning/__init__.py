"""Plan a run: profile the model, place its layers, simulate the schedule; search meshes with mode=tune."""
