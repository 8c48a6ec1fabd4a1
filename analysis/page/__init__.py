"""The report page: claims, tables, figures and timelines in one HTML file that needs no network and no server."""
