"""`report.html` of real runs: written at every orderly end, and looked at as a browser shows it."""

import re
import shutil
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from rowcast.trainer.report.report_json import Report, read_report
from tests.support.processes import Session
from tests.support.starter import Starter

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NUM_STEPS = 120
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LEAST_CONTRAST = 4.5  # of text on its background, by WCAG 2 level AA
PIXELS_OF_TEXT = 12

# contrast of each text with the page's background: the ratio of relative luminances, as WCAG 2 has it
CONTRASTS = """() => {
  const linear = v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const luminance = colour => {
    const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(v => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const page = luminance(getComputedStyle(document.body).backgroundColor);
  return [...document.querySelectorAll("h1, h2, h3, p, dt, dd, li, span, summary, th, td, pre")].map(element => {
    const text = luminance(getComputedStyle(element).color);
    return (Math.max(text, page) + 0.05) / (Math.min(text, page) + 0.05);
  });
}"""
COLOUR = "getComputedStyle(document.body).backgroundColor"
SIZES = "[...document.querySelectorAll('main *')].map(element => parseFloat(getComputedStyle(element).fontSize))"

# pairs of a chart's words that lie on each other
WORDS = """() => [...document.querySelectorAll(".drawing svg")].flatMap(svg => {
  const words = [...svg.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()]);
  const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  return words.flatMap(([word, box], i) => words.slice(i + 1).filter(other => meet(box, other[1])).map(() => word));
})"""


def page_of(session: Session) -> str:
    return (session.run_dir / "report.html").read_text(encoding="utf-8")


class FinishedRun:
    """One run of two processes to the end of its data."""

    def __init__(self, session: Session) -> None:
        data = {"eval_fraction": 0.1, "synthetic": {"samples": 64 * NUM_STEPS * 10 // 9}}
        session.write_job(job={"name": "a <b>short</b> run"}, data=data, eval={"every": 20})
        self.events = session.folder / "events"
        options = [f"--tensorboard={self.events}"] if find_spec("tensorboard") else []
        prefetcher, trainer = session.start("prefetcher"), session.start("trainer", *options)
        prefetcher.ended().quiet()
        self.stdout = trainer.ended().quiet().stdout
        self.report: Report = read_report(session.run_dir / "report.json")
        self.path = session.run_dir / "report.html"
        self.html = page_of(session)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, starter: Starter) -> Iterator[FinishedRun]:
    with Session(tmp_path_factory.mktemp("finished"), starter.launch) as session:
        yield FinishedRun(session)


def test_a_finished_run_has_a_page_with_what_its_report_says(finished: FinishedRun) -> None:
    assert f"finished after {NUM_STEPS} steps" in finished.html
    assert f"<dd>{finished.report.rows_fetched:,} fetched" in finished.html
    assert f"AUC. Over train steps from 20 to {NUM_STEPS}." in finished.html
    assert f"last {finished.report.auc:.4f}" in finished.html
    assert finished.stdout.count("eval after ") == len(dots(finished.html, "AUC")) > 3


def dots(html: str, title: str) -> list[str]:
    """The points of a chart that has them; its legend shows one more."""
    chart = html.partition(f'aria-label="{title}. ')[2].partition("</svg>")[0]
    return re.findall(r"<use [^>]*", chart)[1:]


def test_a_stopped_run_has_one_too_and_the_next_says_what_it_did_not_see(session: Session) -> None:
    session.write_job(data={"eval_fraction": 0.001, "synthetic": {"samples": 64_000 * 5}}, eval={"every": 10})
    session.run_dir.mkdir()
    (session.run_dir / "report.html").write_text("of an earlier run")
    prefetcher, trainer = session.start_training()
    assert not (session.run_dir / "report.html").exists()
    trainer.signal(signal.SIGTERM)
    for process in (prefetcher, trainer):
        process.ended().quiet()
    stopped = read_report(session.run_dir / "report.json")
    assert "stopped by SIGTERM" in page_of(session)
    assert "This process began" not in page_of(session)
    prefetcher, trainer = (
        session.start("prefetcher", f"--max-steps={stopped.train_steps + 30}"),
        session.start("trainer"),
    )
    for process in (prefetcher, trainer):
        process.ended().quiet()
    went_on = read_report(session.run_dir / "report.json")
    assert f"This process began after train step {stopped.train_steps:,}; it made {went_on.steps} of" in page_of(
        session
    )
    assert "Loss. Over train steps from 1 to " in page_of(session), "losses are those of the whole run"
    assert "AUC. Over train steps from 10 to " in page_of(session), "and so are its evaluations"


def test_the_events_for_tensorboard_are_there_with_the_page(finished: FinishedRun) -> None:
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events: Any = EventAccumulator(str(finished.events))
    events.Reload()
    assert events.Scalars("loss")[-1].step == NUM_STEPS
    assert events.Scalars("eval/auc")[-1].value == pytest.approx(finished.report.auc)
    assert {"speed/samples_per_s", "stall_share/rows", "cache/hit_ratio", "eval/logloss"} <= set(
        events.Tags()["scalars"]
    )


# as a browser shows it


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    sync_api = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        pytest.skip(f"no browser is on PATH ({', '.join(BROWSERS)}); `apt-get install chromium` brings one")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()


class Shown:
    """The page in a browser window, and all that it said and asked for on the way."""

    def __init__(self, browser: "Browser", path: Path, width: int, scheme: Literal["light", "dark"]) -> None:
        self.page: Page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())
        for details in self.page.locator("details").all():
            details.evaluate("element => element.open = true")

    def script(self, script: str) -> Any:
        return self.page.evaluate(script)


@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (1400, "dark")])
def test_the_page_reads_well_on_narrow_and_wide_screens_in_both_schemes_and_on_paper(
    finished: FinishedRun, browser: "Browser", width: int, scheme: Literal["light", "dark"]
) -> None:
    shown = Shown(browser, finished.path, width, scheme)
    assert shown.said == [], "errors and refusals are said on the console"
    assert [url for url in shown.asked if not url.startswith("data:")] == [finished.path.as_uri()]
    assert shown.page.get_by_role("heading", level=1).inner_text() == "a <b>short</b> run"
    assert shown.script(WORDS) == [], "words of a chart lie on each other"
    assert shown.script("document.documentElement.scrollWidth") <= width, "nothing is cut off or has to be scrolled to"
    assert (shown.script(COLOUR) == "rgb(255, 255, 255)") == (scheme == "light")
    contrasts = shown.script(CONTRASTS)
    assert len(contrasts) > 100
    assert min(contrasts) >= LEAST_CONTRAST
    assert min(shown.script(SIZES)) >= PIXELS_OF_TEXT
    for plot in shown.page.get_by_role("img").all():
        box = plot.bounding_box()
        assert box is not None
        assert box["width"] > width / 4
        assert box["height"] > 200
    shown.page.emulate_media(media="print")
    assert shown.script(COLOUR) == "rgb(255, 255, 255)", "paper is white"
    assert min(shown.script(CONTRASTS)) >= LEAST_CONTRAST
    shown.page.close()
