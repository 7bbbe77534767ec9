"""The page of a history: whole, escaped, bounded, without the network, drawn by a real browser where there is one."""

from __future__ import annotations

import html
import math
import re
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from relaymeter.harness.track.changes import Change
from relaymeter.harness.track.page import page
from relaymeter.harness.track.page_series import settings_of
from relaymeter.harness.track.page_style import policy
from relaymeter.harness.track.records import CaseRecord, LaunchRecord

CHROMIUM = Path("/usr/bin/chromium")
NASTY = "</script><img src=x onerror=alert(1)>\"'&\x1b\udcff <b>"
VOID = ("meta", "input", "br")


def launch(commit: int, number: int = 0, *, move_s: float = 0.01, ok: bool = True, machine: str = "m1") -> LaunchRecord:
    case = CaseRecord(
        name="weights",
        exact={"bytes_total": 1000 if commit < 2 else 1024, "digest": "00ff"},
        samples={"plan_s": (0.001,), "move_s": (move_s * (1 + number / 100),), "moved_bytes_per_s": (1000 / move_s,)},
        digest_passed=2 if ok else 1,
        digest_total=2,
    )
    return LaunchRecord(
        utc=f"2026-11-{1 + commit % 28:02d}T00:00:0{number % 10}Z", session_id="s", launch=number + 1,
        machine_id=machine, config_hash="c1", suite="ci", version="1.0", commit=f"{commit:040x}",
        commit_utc=f"2026-10-{1 + commit % 28:02d}T00:00:00Z", dirty=False, cases=(case,),
    )  # fmt: skip


def change(index: int, *, before: float = 0.01, after: float = 0.0134, metric: str = "move_s") -> Change:
    commit = f"{index:040x}"
    return Change(
        setting=("ci", "m1", "c1"), case="weights", metric=metric,
        index=index, commit=commit, label=commit[:9], before=before, after=after,
        ratio=after / before, p_value=1e-6,
    )  # fmt: skip


def history(commits: int = 6, launches: int = 5) -> list[LaunchRecord]:
    """Slower from commit 4 on."""
    return [
        launch(commit, number, move_s=0.01 if commit < 4 else 0.0134)
        for commit in range(commits)
        for number in range(launches)
    ]


def renamed(record: LaunchRecord, name: str) -> LaunchRecord:
    return replace(record, cases=(replace(record.cases[0], name=name),))


class Outline(HTMLParser):
    """Checks that elements are closed in order, and keeps what matters of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data if self.open[-1:] not in (["script"], ["style"]) else ""


def outline(text: str) -> Outline:
    found = Outline()
    found.feed(text)
    found.close()
    assert found.open == []
    return found


def test_every_timed_metric_has_a_plot_with_every_commit_and_launch() -> None:
    text = page(history(), [change(4)])
    outline(text)
    assert text.count('<svg class="plot"') == 3
    first = text[text.index('<svg class="plot"') :]
    first = first[: first.index("</svg>")]
    assert "move_s over 6 commits; 1.34x slower at 000000000" in first  # the whole move first
    titles = re.findall(r"<title>(.*?)</title>", first[first.index('class="hits"') :])
    assert len(titles) == 6
    assert titles[0] == "000000000 2026-10-01: 10.2 ms, 5 launches 10 ms to 10.4 ms"
    launches = re.search('class="launches" d="(.*?)"', first)
    assert launches is not None and launches.group(1).count("M") + len(re.findall("l3 -?5h-6z", first)) == 30
    assert first.count('class="worse"') == 1 and "\u25b2 1.34x slower" in first and 'class="level"' in first


def test_changes_stand_in_a_list_and_exact_metrics_in_a_table() -> None:
    text = page(history(), [change(4), change(4, metric="moved_bytes_per_s", before=1e5, after=1e5 / 1.34)])
    found = outline(text).text
    assert "10 ms13.4 ms<0.0001" in found and "also changed there" in found
    assert "bytes_total1,024 B000000000: 1,000 B \u2192 1,024 B" in found
    assert "digest00ffnever" in found
    assert "No metric changed" in page(history(2), [])


def test_a_change_of_an_exact_metric_is_a_change_in_every_list() -> None:
    text = page(history(), [])
    found = outline(text).text
    assert "No metric changed" not in text
    assert "000000000weightsbytes_total\u25b2 +2.4%1,000 B1,024 Bexact-" in found
    assert "\u25b2 +2.4% bytes_total at 000000000" in found, "in the overview"
    both = outline(page(history(), [change(2)])).text
    assert "10 ms13.4 ms<0.0001bytes_total 1,000 B \u2192 1,024 B" in both
    other = [replace(one, cases=(replace(one.cases[0], exact={"digest": f"0{one.commit == f'{1:040x}'}"}),))
             for one in history(2)]  # fmt: skip
    assert "\u25c6 other bits" in page(other, [])


def test_exact_metrics_change_where_a_check_says_so() -> None:
    def at(commit: int, value: int, *, dirty: bool = False, ok: bool = True) -> LaunchRecord:
        one = launch(commit, ok=ok)
        return replace(one, dirty=dirty, cases=(replace(one.cases[0], exact={"bytes_total": value}),))

    odd = [at(1, 3), at(1, 4, dirty=True), at(2, 3), at(3, 5, ok=False), at(4, 3)]
    (view,) = settings_of(odd, [], most_spots=100)[0].cases[0].exact
    assert (view.now, view.changes) == ((3,), ())
    (only,) = settings_of(odd[1:2], [], most_spots=100)[0].cases[0].exact
    assert (only.now, only.changes) == ((4,), ())
    found = page([at(1, 4), at(2, 3)], [])
    assert '<span class="tag worse">\u25bc -25%</span>' in found, "half of a destination is no gain"


def test_things_are_counted_in_the_singular_and_plural() -> None:
    both = [change(4), change(4, metric="plan_s")]  # of one case at one commit: one change
    facts = re.findall("<li>(.*?)</li>", page(history(), both))
    assert facts == [
        "<b>6</b> commits", "<b>30</b> launches", "<b>1</b> case", "<b>1</b> change of times for the worse",
        "<b>0</b> for the better", "<b>1</b> change of an exact metric", "<b>all</b> bits arrived",
    ]  # fmt: skip
    facts = re.findall("<li>(.*?)</li>", page(history(1, 1), []))
    assert facts[:2] == ["<b>1</b> commit", "<b>1</b> launch"]
    assert "<b class=bad>1</b> result with WRONG BITS" in page([launch(0, ok=False)], [])


def test_launches_of_other_machines_are_pointed_at_from_the_top() -> None:
    text = page([launch(0, machine="m0"), *history()], [])
    assert '<a href="#others">1 launch of other' in text and text.count('id="others"') == 1
    assert "#others" not in page(history(), [])


def test_launches_with_wrong_bits_are_marked_and_their_times_not_drawn() -> None:
    launches = [launch(0), launch(0, 1, move_s=0.0001, ok=False), launch(1, ok=False)]
    text = page(launches, [])
    assert "WRONG in 2 launches" in text and "1 launch, WRONG BITS in 1" in text
    assert "no time, WRONG BITS in 1" in text and "100 us" not in text.replace("1 ms", "")
    assert 'class="wrong"' in text
    outline(page([launch(0, ok=False)], []))


def test_settings_are_not_mixed_and_a_change_is_drawn_in_its_own() -> None:
    other = [launch(commit, number, move_s=0.5, machine="m0") for commit in range(3) for number in range(5)]
    slower = replace(change(2), setting=("ci", "m0", "c1"))
    found = settings_of([*other, *history()], [change(4), slower], most_spots=1000)
    assert [setting.machine_id for setting in found] == ["m1", "m0"]
    for setting, at in zip(found, (4, 2), strict=True):
        assert [place for place, _ in setting.cases[0].metrics[0].changes] == [at]
    text = page([*other, *history()], [])
    assert text.index("machine <code>m1</code>") < text.index("on machine m0")
    outline(text)


def test_any_text_is_escaped() -> None:
    launches = [renamed(replace(one, suite=NASTY, machine_id=NASTY, version=NASTY, commit=None), NASTY)
                for one in history(2, 1)]  # fmt: skip
    text = page(launches, [])
    text.encode("utf-8")
    found = outline(text)
    assert "img" not in found.tags and "b" in found.tags and found.tags.count("script") == 1
    assert "</script><img src=x onerror=alert(1)>\"'&\\x1b\\xff <b>" in found.text
    assert not [name for _, name, _ in found.attributes if name.startswith("on") or name == "style"]


def test_nothing_of_the_page_reaches_out() -> None:
    text = page(history(), [change(4)])
    found = outline(text)
    assert "//" not in re.sub(r"sha256-\S+", "", text.replace("<!DOCTYPE html>", ""))
    assert not {"link", "img", "iframe", "object", "embed", "base", "form", "use", "image"} & set(found.tags)
    assert all(value.startswith("#") for _, name, value in found.attributes if name in ("href", "src", "xlink:href"))
    rules = html.unescape(next(value for tag, name, value in found.attributes if (tag, name) == ("meta", "content")))
    assert rules == policy() and rules.startswith("default-src 'none';") and "unsafe" not in rules


def test_hundreds_of_commits_of_twenty_metrics_stay_below_five_megabytes() -> None:
    few = history(480, 5)
    cases = [replace(few[0].cases[0], name=f"case-{number}") for number in range(7)]
    launches = [replace(one, cases=tuple(replace(one.cases[0], name=case.name) for case in cases)) for one in few]
    text = page(launches, [])
    assert len(text.encode()) < 5_000_000
    assert "4 older commits not drawn" in text


def test_one_far_launch_does_not_flatten_the_plot() -> None:
    launches = [*history(6, 5), launch(5, 9, move_s=1.0)]
    text = page(launches, [])
    first = text[text.index('<svg class="plot"') :]
    assert 'class="beyond"' in first[: first.index("</svg>")]


def test_small_and_empty_histories_have_a_page_too() -> None:
    for launches in ([], history(1, 1), [replace(launch(0), cases=())]):
        outline(page(launches, []))
    assert "track run" in page([], [])
    assert "NaN" not in page(history(1, 1), []) and not math.isnan(len(page(history(1, 1), [])))


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.settimeout(0.0)
        yield server


def chromium(folder: Path, file: Path, *more: str) -> tuple[str, str]:
    """The DOM after all scripts, and what the browser logged."""
    profile = folder / "profile"
    profile.mkdir()
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # its own services are kept off the network, too
        f"--user-data-dir={profile}", "--enable-logging=stderr", f"--log-net-log={folder / 'net.json'}", *more,
        "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    return done.stdout, done.stderr


@pytest.mark.skipif(not CHROMIUM.exists(), reason="no /usr/bin/chromium here: apt-get install -y chromium (Debian)")
def test_chromium_draws_the_page_and_asks_nothing_of_the_network(tmp_path: Path, listener: socket.socket) -> None:
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    text = page(history(), [change(4)])
    # what somebody might smuggle in: the page's own policy has to stop it
    smuggled = f'<img src="{address}i"><script src="{address}s"></script><script>document.title="ran"</script></body>'
    for name, content in (("page", text), ("smuggled", text.replace("</body>", smuggled))):
        folder = tmp_path / name
        folder.mkdir()
        file = folder / "page.html"
        file.write_text(content, encoding="utf-8")
        picture = folder / "page.png"
        dom, log = chromium(folder, file, f"--screenshot={picture}", "--window-size=1200,1600")
        root = re.search("<html[^>]*>", dom)
        assert root is not None and 'data-plots="3"' in root.group()
        assert dom.count('tabindex="0"') == 3 and '<p class="filter"><label>' in dom
        assert "<title>Move latency: ci</title>" in dom
        console = [line for line in log.splitlines() if "CONSOLE" in line]
        urls = re.findall(r'"url":"(\w+://[^/"]*)', (folder / "net.json").read_text(encoding="utf-8"))
        # the browser's own services are not the page's doing
        asked = [url for url in urls if not re.search(r"(google|googleapis|gstatic)\.com$", url)]
        if name == "page":
            assert console == [] and picture.stat().st_size > 20_000
            assert asked == []
        else:
            assert len(console) == 3 and all("Content Security Policy" in line for line in console)
            assert asked == []
    with pytest.raises(BlockingIOError):
        listener.accept()
