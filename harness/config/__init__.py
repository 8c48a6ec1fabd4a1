"""The keys of a run: their dataclasses, the overrides that the user types, and the plug-ins that there are."""
