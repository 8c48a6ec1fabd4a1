"""Myelin (published later as AxoNN): its tables and figures beside ours, its claims, and what each mechanism brings."""
