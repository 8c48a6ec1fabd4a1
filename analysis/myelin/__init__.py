"""Myelin (published later as AxoNN): its tables and figures next to ours, its claims, and what each part gains."""
