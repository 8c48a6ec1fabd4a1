"""The search for orders on fifty random chains: python -m analysis.order_search."""
