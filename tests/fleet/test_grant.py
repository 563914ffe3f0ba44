"""The grant: its file, how uses are counted against its lines, and which node has a place."""

from __future__ import annotations

import contextlib
import datetime as dt
from dataclasses import replace
from pathlib import Path

import pytest
from google.cloud import tpu_v2

from tpu_ops.cloud import queued_resources
from tpu_ops.cloud.node import Node
from tpu_ops.cloud.queued_resources import QueuedNode, QueuedResource
from tpu_ops.cloud.remaking import Made, Plan
from tpu_ops.errors import UsageError
from tpu_ops.fleet import grant, grant_mail, holdings
from tpu_ops.fleet.grant import Line, Use

NOW = dt.datetime(2027, 1, 10, 12, tzinfo=dt.UTC)
TRC = """
ends: 2027-01-31
lines:
  - 32 on-demand Cloud TPU v4 chips in zone us-central2-b
  - 32 spot Cloud TPU v4 chips in zone us-central2-b
  - 64 spot Cloud TPU v5e chips in zone europe-west4-b
  - 5 preemptible Cloud TPU v2-8 device(s) in zone us-central1-f
  - {chips: 64, type: v6e, zone: us-east1-d, spot: true}
  - {count: 2, type: v3-8, zone: europe-west4-a}
"""


def written(tmp_path: Path, text: str) -> grant.Grant:
    file = tmp_path / "grant.yml"
    file.write_text(text)
    found = grant.read(file)
    assert found
    return found


def use(kind: str, zone: str = "us-central2-b", *, spot: bool = False, name: str = "x") -> Use:
    return Use(f"projects/p/locations/{zone}/nodes/{name}", kind, zone, spot, "READY")


def test_the_lines_of_the_e_mail_and_mappings_say_the_same(tmp_path: Path) -> None:
    found = written(tmp_path, TRC)
    assert found.ends == dt.datetime(2027, 2, 1, tzinfo=dt.UTC)
    assert [(line.amount, line.kind, line.zone, line.spot, line.number) for line in found.lines] == [
        (32, "v4", "us-central2-b", False, 4),
        (32, "v4", "us-central2-b", True, 5),
        (64, "v5litepod", "europe-west4-b", True, 6),
        (5, "v2-8", "us-central1-f", True, 7),
        (64, "v6e", "us-east1-d", True, 8),
        (2, "v3-8", "europe-west4-a", False, 9),
    ]
    assert [grant.parse_line(str(line)) == Line(line.amount, line.kind, line.zone, line.spot) for line in found.lines]


@pytest.mark.parametrize(
    ("kind", "chips"),
    [("v4-64", 32), ("v4-8", 4), ("v5litepod-64", 64), ("v6e-8", 8), ("v3-8", 4), ("v5p-16", 8), ("v99-8", 0)],
)
def test_chips_are_counted_by_the_table_of_accelerator_types(kind: str, chips: int) -> None:
    assert grant.chips_of(kind) == chips


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("ends: soon\nlines: [4 spot Cloud TPU v4 chips in zone us-central2-b]", "line 1: ends: expected the last day"),
        (
            "lines: [4 spot Cloud TPU v4 chips in zone us-central2-b]",
            "line 1: ends: expected the last day",
        ),
        ("ends: 2027-01-31", "the grant has no lines"),
        ("ends: 9999-12-31T23:00:00-02:00\nlines: []", "line 1: ends: expected the last day"),
        ("ends: '0001-01-01T00:00:00+02:00'\nlines: []", "line 1: ends: expected the last day"),
        ("ends: 2027-01-31\nlines: 4", "line 2: lines: expected a list of lines, found 4"),
        ("ends: 2027-01-31\nlines: &x [*x]", "line 2: expected a line of the grant"),
        ("ends: [", "not valid YAML"),
        ("ends: 2027-01-31\nlines: [-5 spot Cloud TPU v4 chips in zone us-central2-b]", "'-5 spot Cloud TPU v4 chips"),
        ("ends: 2027-01-31\nlines:\n- 4 TPUs", "line 3: '4 TPUs' has another form than Google's lines"),
        ("ends: 2027-01-31\nlines:\n- {chips: 4, type: v4-8, zone: us-central2-b}", "chips are counted for a gen"),
        ("ends: 2027-01-31\nlines:\n- {count: 4, type: v4, zone: us-central2-b}", "devices are counted for an acc"),
        ("ends: 2027-01-31\nlines:\n- {chips: 4, type: v7, zone: us-central2-b}", "unknown TPU generation 'v7'"),
        ("ends: 2027-01-31\nlines:\n- {chips: 0, type: v4, zone: us-central2-b}", "chips: expected a whole number"),
        ("ends: 2027-01-31\nlines:\n- {chips: true, type: v4, zone: us-central2-b}", "chips: expected a whole number"),
        ("ends: 2027-01-31\nlines:\n- {chips: 4, type: v4, zone: US}", "zone: expected a zone, as in us-central2-b"),
        ("ends: 2027-01-31\nlines:\n- {chips: 4, type: v4}", "line 3: the line has no zone"),
        ("ends: 2027-01-31\nlines:\n- {chips: 4, count: 4, type: v4, zone: us-a-b}", "either `chips`"),
        ("ends: 2027-01-31\nlines:\n- {chips: 4, type: v4, zone: us-a-b, spott: true}", "did you mean 'spot'?"),
        ("ends: 2027-01-31\nline: []", "line 2: unknown key 'line', did you mean 'lines'?"),
    ],
)
def test_a_fault_of_the_file_is_named_with_its_line(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(UsageError) as wrong:
        written(tmp_path, text)
    assert fault in str(wrong.value)
    assert "ansible-doc" not in str(wrong.value)
    assert wrong.value.where.startswith(str(tmp_path / "grant.yml"))


def test_a_file_with_the_other_ending_is_named(tmp_path: Path) -> None:
    (tmp_path / "grant.yaml").write_text("ends: 2027-01-31")
    with pytest.raises(UsageError, match=r"grant\.yaml: only grant\.yml is read \(rename it to grant\.yml\)"):
        grant.read(tmp_path / "grant.yml")


def test_all_faults_of_the_file_are_named_together(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as wrong:
        written(tmp_path, "ends: x\nlines:\n- 4 TPUs\n- {chips: no, type: v4, zone: Z}\n")
    assert wrong.value.what == "the file has 4 faults"
    assert [text.partition(":")[0] for text in wrong.value.details] == ["line 1", "line 3", "line 4", "line 4"]


@pytest.mark.parametrize(
    ("ends", "moment", "over"),
    [
        ("2027-01-31", "2027-01-31T23:59:59+00:00", False),
        ("2027-01-31", "2027-02-01T00:00:00+00:00", True),
        ("2027-01-31T12:00:00Z", "2027-01-31T11:59:59+00:00", False),
        ("2027-01-31T12:00:00+02:00", "2027-01-31T10:00:00+00:00", True),
        ("'2027-01-31'", "2027-01-31T23:59:59+00:00", False),
        ("'20270131'", "2027-02-01T00:00:00+00:00", True),
        ("9999-12-31", "9999-12-31T23:59:59+00:00", False),
    ],
)
def test_the_end_is_a_moment_in_utc(tmp_path: Path, ends: str, moment: str, over: bool) -> None:
    found = written(tmp_path, f"ends: {ends}\nlines: [4 spot Cloud TPU v4 chips in zone us-central2-b]")
    assert (dt.datetime.fromisoformat(moment) >= found.ends) == over


@pytest.mark.parametrize(
    ("uses", "free"),
    [
        ([], [32, 32, 64, 5, 64, 2]),
        ([use("v4-32")], [16, 32, 64, 5, 64, 2]),
        ([use("v4-32", spot=True), use("v2-8", "us-central1-f", spot=True)], [32, 16, 64, 4, 64, 2]),
        ([use("v5litepod-32", "europe-west4-b", spot=True)] * 2, [32, 32, 0, 5, 64, 2]),
        ([use("v6e-64", "us-east1-d", spot=True), use("v6e-8", "us-east1-d", spot=True)], [32, 32, 64, 5, 0, 2]),
        ([use("v3-8", "europe-west4-a"), use("v3-32", "europe-west4-a")], [32, 32, 64, 5, 64, 1]),
    ],
)
def test_uses_are_counted_against_the_lines_that_cover_them(tmp_path: Path, uses: list[Use], free: list[int]) -> None:
    found = written(tmp_path, TRC)
    held, outside = grant.shares(found, uses)
    assert [grant.free(line, members) for line, members in zip(found.lines, held, strict=True)] == free
    assert sum(map(len, held)) + len(outside) == len(uses)


def test_the_oldest_uses_have_the_room_of_a_line(tmp_path: Path) -> None:
    found = written(tmp_path, TRC)
    times = {"a": "", "b": "2027-01-03T00:00:00Z", "c": "2027-01-02T00:00:00.5Z", "d": "2027-01-02T00:00:00Z"}
    uses = [replace(use("v4-32", name=name), created=created) for name, created in times.items()]
    held, outside = grant.shares(found, uses)
    assert [[one.name[-1] for one in part] for part in (held[0], outside)] == [["d", "c"], ["b", "a"]]


@pytest.mark.parametrize(
    ("asked", "uses", "line"),
    [
        (("v4-64", (), None), [], 4),
        (("v4-64", (), None), [use("v4-8")], 5),
        (("v4-64", (), True), [], 5),
        (("v4-8", ("us-central2-b",), False), [use("v4-8")], 4),
        (("v5litepod-64", (), None), [], 6),
        (("v2-8", (), None), [use("v2-8", "us-central1-f", spot=True)] * 4, 7),
        (("v3-8", ("europe-west4-a", "us-central2-b"), None), [], 9),
    ],
)
def test_the_first_line_with_room_is_chosen(
    tmp_path: Path, asked: tuple[str, tuple[str, ...], bool | None], uses: list[Use], line: int
) -> None:
    kind, zones, spot = asked
    assert grant.with_room(written(tmp_path, TRC), uses, kind, NOW, zones=zones, spot=spot)[0].number == line


@pytest.mark.parametrize(
    ("asked", "uses", "what", "fix"),
    [
        (
            ("v2-8", ("us-central1-b",), False),
            [],
            "no line of the grant covers a v2-8 on-demand node in zone us-central1-b",
            "'5 spot Cloud TPU v2-8 device(s) in zone us-central1-f', which needs --zone us-central1-f, --spot",
        ),
        (("v4-128", (), None), [], "32 of 32 chips are free, 64 are needed", "use a smaller accelerator type"),
        (
            ("v4-64", (), False),
            [use("v4-8", name="old")],
            "the grant has no room for a v4-64 on-demand node: 28 of 32 chips are free, 32 are needed",
            "delete what is not needed (node old); the nearest line is '32 on-demand",
        ),
        (("v5p-8", (), None), [], "no line of the grant covers a v5p-8 node", "the nearest line is"),
        (("v2-32", (), None), [], "no line of the grant covers a v2-32 node", "which needs --type v2-8"),
    ],
)
def test_a_refusal_names_the_nearest_line(
    tmp_path: Path, asked: tuple[str, tuple[str, ...], bool | None], uses: list[Use], what: str, fix: str
) -> None:
    kind, zones, spot = asked
    with pytest.raises(UsageError) as wrong:
        grant.with_room(written(tmp_path, TRC), uses, kind, NOW, zones=zones, spot=spot)
    assert what in wrong.value.what
    assert fix in wrong.value.fix
    assert "--outside-grant" in wrong.value.fix
    assert ", line " in wrong.value.where


def test_nothing_has_a_place_after_the_end(tmp_path: Path) -> None:
    found = written(tmp_path, TRC)
    with pytest.raises(UsageError, match="the grant ended on 2027-02-01 00:00 UTC"):
        grant.with_room(found, [], "v4-8", found.ends, spot=None)


@pytest.mark.parametrize(
    ("left", "text"),
    [
        (dt.timedelta(days=7, seconds=1), ""),
        (dt.timedelta(days=7), "the grant ends in 7 days"),
        (dt.timedelta(days=1, hours=2), "the grant ends in 1 day,"),
        (dt.timedelta(hours=5), "the grant ends in 5 h"),
        (dt.timedelta(minutes=20), "the grant ends in less than 1 h,"),
        (dt.timedelta(0), "the grant ended on 2027-02-01 00:00 UTC"),
    ],
)
def test_the_end_is_announced_from_seven_days_before_it(tmp_path: Path, left: dt.timedelta, text: str) -> None:
    found = written(tmp_path, TRC)
    assert found.warning(found.ends - left).startswith(text)
    assert bool(found.warning(found.ends - left)) == bool(text)


QUEUE = QueuedResource(
    "big", "p", "us-central2-b", "ACTIVE", nodes=(QueuedNode("big-0", "v4-8"), QueuedNode("big-1", "v4-8"))
)


@pytest.mark.parametrize("state", ["WAITING_FOR_RESOURCES", "FAILED", "SUSPENDED", "ACTIVE", "DELETING"])
def test_a_queued_resource_holds_quota_in_every_state_for_nodes_that_do_not_exist(state: str) -> None:
    node = Node("big-1", "p", "us-central2-b", "1", "v4-8", state="READY", queued_resource="big", chips=4)
    uses = holdings.uses_of([node], [QUEUE._replace(state=state)])
    assert [(one.name, one.node) for one in uses] == [(node.full_name, ""), (QUEUE.full_name, "big-0")]
    assert str(uses[1]) == f"queued resource big ({state})"


@pytest.mark.parametrize(("scheduling", "spot"), [({}, False), ({"spot": True}, True), ({"preemptible": True}, True)])
def test_type_and_tier_of_a_queued_resource_are_those_of_its_node(scheduling: dict[str, bool], spot: bool) -> None:
    node = {"accelerator_config": {"type_": "V4", "topology": "2x2x4"}, "scheduling_config": scheduling}
    spec = {"node_id": "pod", "node": node}
    raw = tpu_v2.QueuedResource(name=QUEUE.full_name, tpu={"node_spec": [spec]})
    found = queued_resources.parsed(tpu_v2.QueuedResource.pb(raw))
    assert found
    assert (found.nodes, found.spot) == ((QueuedNode("pod", "v4-32"),), spot)


MAIL = """
> Date: Mon, 4 Jan 2027 10:00:00 -0800
> Subject: You have access to free Cloud TPUs
>
> Your free TPUs can be used for the next 30 days in project my-project (1234):
>
>  * 32 on-demand Cloud TPU v4 chips in zone us-central2-b
>  • 64 spot Cloud TPU v5e chips in zone europe-west4-b.
>  - 5 preemptible Cloud TPU v2-8 device(s) in zone us-central1-f
>  - 8 reserved Cloud TPU v9 chips in zone us-central1-f
>
> We recommend to use on-demand TPUs first. Ask trc-support about 2 or more questions.
"""


def test_a_pasted_e_mail_becomes_a_grant(tmp_path: Path) -> None:
    mail = grant_mail.read(MAIL)
    assert [str(line) for line in mail.taken] == [
        "32 on-demand Cloud TPU v4 chips in zone us-central2-b",
        "64 spot Cloud TPU v5e chips in zone europe-west4-b",
        "5 spot Cloud TPU v2-8 device(s) in zone us-central1-f",
    ]
    assert [text for text, _ in mail.unknown] == ["- 8 reserved Cloud TPU v9 chips in zone us-central1-f"]
    assert (mail.days, mail.sent, mail.ends(dt.date(2030, 1, 1))) == (30, dt.date(2027, 1, 4), dt.date(2027, 2, 3))
    found = written(tmp_path, grant_mail.document(mail.taken, dt.date(2027, 2, 3)))
    assert found.ends == dt.datetime(2027, 2, 4, tzinfo=dt.UTC)
    assert [str(line) for line in found.lines] == [str(line) for line in mail.taken]


@pytest.mark.parametrize(
    ("text", "days"), [("6 months", 180), ("a 90-day grant", 90), ("30 days or 60 days", None), ("", None)]
)
def test_the_length_of_the_grant_is_read_from_the_e_mail(text: str, days: int | None) -> None:
    assert grant_mail.read(text).days == days


FIRST = "32 on-demand Cloud TPU v4 chips in zone us-central2-b"


@pytest.mark.parametrize(
    ("text", "taken", "unknown"),
    [
        ("\u200b*32* on\u2011demand Cloud TPU v4 chips in zone **us\u2011central2\u2011b**\ufeff", FIRST, []),
        (f"<ul><li class='x'>{FIRST.replace(' v4', '&nbsp;<b>v4</b>')}</li></ul>", FIRST, []),
        (f"&bull; {FIRST} <https://cloud.google.com/tpu>", FIRST, []),
        ("> " + FIRST.replace("zone ", "zone\n> ") + "\n> Thank you", FIRST, []),
        ("Intro=C2=A0text=\n goes on\n=E2=80=A2 " + FIRST.replace("TPU", "T=\nPU"), FIRST, []),
        (FIRST.replace("32", "1,024"), FIRST.replace("32", "1024"), []),
        (f"-{FIRST}", "", [f"-{FIRST}"]),
        (f"- {FIRST}", FIRST, []),
        (FIRST.replace("TPU ", "TPU\n").replace("in ", "in\n"), FIRST, []),
        # A line or an e-mail that is cut.
        (FIRST.partition(" chips")[0], "", [FIRST.partition(" chips")[0]]),
        (FIRST.partition(" Cloud")[0], "", [FIRST.partition(" Cloud")[0]]),
        (FIRST.removesuffix("-b"), "", [FIRST.removesuffix("-b")]),
        # Sentences with numbers: about TPUs, and about other things.
        ("You may also use 64 more v4 TPU cores.", "", ["You may also use 64 more v4 TPU cores."]),
        ("We have added 16 TPUs.", "", ["We have added 16 TPUs."]),
        ("For the next 30 days, read about Cloud TPUs in 2 guides of project p (1234).", "", []),
        ("This free 30-day trial is only for Cloud TPUs in the zones listed above.", "", []),
        ("https://cloud.google.com/tpu/docs/v4-users-guide", "", []),
    ],
)
def test_lines_are_found_as_mail_programs_write_them(text: str, taken: str, unknown: list[str]) -> None:
    mail = grant_mail.read(text)
    assert [str(line) for line in mail.taken] == ([taken] if taken else [])
    assert [row for row, _ in mail.unknown] == unknown


@pytest.mark.parametrize(
    ("text", "day"),
    [
        ("Mon, Oct 5, 2026 at 10:00 AM", "2026-10-05"),
        ("> On Mon, Oct 5, 2026 at 10:00 AM TRC <\n> trc@x.org> wrote:", "2026-10-05"),
        ("Date: 2026-10-05 10:00", "2026-10-05"),
        ("2026-10-05T10:00:00Z", "2026-10-05"),
        ("*Sent:* Monday, 5 October 2026", "2026-10-05"),
        ("Date: Fri, 1 Jan 2027 09:00:00 +0100\nForwarded:\nDate: Mon, Oct 5, 2026 at 10:00 AM", "2026-10-05"),
        ("Date: Mon, 5 Oct 2026 10:00:00 -0800\nOn May 9, 2027 we close. 2027-01-02 is a holiday.", "2026-10-05"),
        ("Date: Thu, 31 Dec 9999 23:59:59 +0000", None),
        ("Date: 31 Feb 2026", None),
    ],
)
def test_the_date_of_the_original_e_mail_is_found(text: str, day: str | None) -> None:
    sent = grant_mail.read(text).sent
    assert (sent and sent.isoformat()) == day


def plan(kind: dict[str, object], state: str = "PREEMPTED") -> tuple[holdings.Holdings, Plan]:
    node = Node("pod", "p", "us-central2-b", "1", "v4-32", state=state, chips=16)
    return holdings.Holdings((node,), ()), Plan((Made(node.full_name, "1", kind),))


TORUS = {"accelerator_config": {"type_": "V4", "topology": "2x2x4"}}
SPOT = {"accelerator_type": "v4-32", "scheduling_config": {"spot": True}}


@pytest.mark.parametrize(
    ("kind", "lines", "refusal"),
    [
        (TORUS, "[16 on-demand Cloud TPU v4 chips in zone us-central2-b]", ""),
        (TORUS, "[8 on-demand Cloud TPU v4 chips in zone us-central2-b]", "8 of 8 chips are free, 16 are needed"),
        (TORUS, "[16 spot Cloud TPU v4 chips in zone us-central2-b]", "no line of the grant covers a v4-32 on-demand"),
        (SPOT, "[16 spot Cloud TPU v4 chips in zone us-central2-b]", ""),
    ],
)
def test_a_recovery_needs_room_for_the_nodes_that_it_creates_again(
    tmp_path: Path, kind: dict[str, object], lines: str, refusal: str
) -> None:
    found = written(tmp_path, f"ends: 2027-01-31\nlines: {lines}")
    with pytest.raises(UsageError, match=refusal) if refusal else contextlib.nullcontext():
        holdings.refuse_uncovered(found, *plan(kind), NOW)
    # A node that serves is not created again, and needs no room.
    holdings.refuse_uncovered(found, *plan(kind, "READY"), found.ends)


@pytest.mark.parametrize(("zone", "refused"), [("us-central2-b", False), ("us-east5-a", True)])
def test_a_run_with_recovery_begins_only_on_nodes_that_the_grant_covers(
    tmp_path: Path, zone: str, refused: bool
) -> None:
    node = Node("pod", "p", zone, "1", "v4-64", chips=32)
    with pytest.raises(UsageError, match="no line of the grant covers") if refused else contextlib.nullcontext():
        holdings.must_be_covered(written(tmp_path, TRC), [node], NOW)
    holdings.must_be_covered(None, [node], NOW)
