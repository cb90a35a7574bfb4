"""Libraries without their remarks, for a while: what is the matter is said in one line, and by us."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def quiet() -> Iterator[None]:
    """transformers' errors only; what one library will have to change in another is not the user's to know."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def reading(path: str) -> Iterator[None]:
    """`datasets` at work on a table. Raises: ValueError in one line that names it, for whatever it raises"""
    from datasets.utils import logging  # a second to import: only where there are tables

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    except Exception as error:  # of many kinds
        cause = error.__cause__ or error
        raise ValueError(f"data: cannot read {path!r}: {' '.join(str(cause).split())[:300]}") from error
    finally:
        logging.set_verbosity(before)
