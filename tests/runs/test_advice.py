"""What is said to do about a run, by what was seen of it."""

from __future__ import annotations

import pytest

from tpu_ops.runs import advice


@pytest.mark.parametrize(
    ("resumes", "said"),
    [
        (False, "`tpu_ops attach r1` follows it, `tpu_ops stop r1` ends it; or choose another --name"),
        (True, "`tpu_ops attach r1 --recover` resumes it, `tpu_ops stop r1` ends it; or choose another --name"),
    ],
    ids=["the run is on", "no process recovers it"],
)
def test_a_name_that_is_taken_names_what_gets_at_its_run(resumes: bool, said: str) -> None:
    assert advice.name_taken("r1", resumes=resumes) == said
