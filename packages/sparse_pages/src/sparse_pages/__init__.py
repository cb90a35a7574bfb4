"""Score and select the pages of a KV cache that each block of queries should read."""

from sparse_pages.select import MOST_PAGES, select_pages
from sparse_pages.summary import PageSummary, Scorer

__all__ = ["MOST_PAGES", "PageSummary", "Scorer", "select_pages"]
