"""Text that hypothesis draws, without its table of UTF-8: every process of a fresh clone makes that for seconds."""

from __future__ import annotations

from hypothesis import strategies as st

_ASCII = st.characters(max_codepoint=127)
#: All that UTF-8 can say: everything but surrogates.
_ANY = st.characters(exclude_categories=["Cs"])


def text(max_size: int) -> st.SearchStrategy[str]:
    """Return any text up to a length."""
    return st.text(_ANY, max_size=max_size)


def matching(pattern: str) -> st.SearchStrategy[str]:
    """Return ASCII text that a pattern describes as a whole."""
    return st.from_regex(pattern, fullmatch=True, alphabet=_ASCII)
