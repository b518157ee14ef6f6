# SPDX-License-Identifier: Apache-2.0
"""The page of the server: what its file may hold, and what a person meets in a real browser.

Tests with the marker `browser` drive a headless Chromium (`make test-browser`). They ask nothing of
the server but its protocol, so they also run against one that runs already:
UTIO_PAGE_URL=http://127.0.0.1:8000/ make test-browser.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import importlib
import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from helpers.serving import running

import utio_jax
from utio_jax.cli.serve import Serve
from utio_jax.engine import Shapes
from utio_jax.serving.app import _page_policy

PAGE = Path(utio_jax.__file__).parent / "serving" / "page.html"
HTML = PAGE.read_text()
NOTHING = "\u2013"  # What a figure says before there is one.


def inline_texts(html: str) -> dict[str, list[str]]:
    return {
        tag: re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", html, flags=re.DOTALL)
        for tag in ("style", "script")
    }


class Elements(HTMLParser):
    """Every opening tag of the page, with its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(HTML)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def named(self, *tags: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.found if tag in tags]


# --- the file


def test_the_page_is_one_file_with_one_style_and_one_script() -> None:
    elements = Elements()
    assert elements.named("style") == [{}]
    assert elements.named("script") == [{}]
    assert not elements.named("link", "img", "iframe", "object", "embed", "base", "audio", "video")
    for tag, attributes in elements.found:
        barred = {"style", "src", "srcdoc", "action", "formaction"} & set(attributes)
        barred |= {"href"} & set(attributes) if tag != "a" else set()
        barred |= {name for name in attributes if name.startswith("on")}
        assert not barred, (tag, barred)
    assert not re.findall(r"https?:|//\w|@import|url\(", HTML)
    links = {attributes["href"] for attributes in elements.named("a")}
    assert links == {"openapi.json", "metrics"}, "of this server, wherever it is mounted"


def test_the_hashes_of_style_and_script_are_those_that_a_browser_computes() -> None:
    # A browser reads CRLF as LF before it hashes; the hash of the file would then be another.
    assert b"\r" not in PAGE.read_bytes()
    texts = inline_texts(HTML)
    assert [len(texts["style"]), len(texts["script"])] == [1, 1]
    assert all(text.strip() for (text,) in texts.values())
    policy = _page_policy(HTML)
    assert policy.startswith("default-src 'none'")
    for tag, (text,) in texts.items():
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy


def test_the_script_writes_text_as_text_and_keeps_nothing() -> None:
    ((script,), (style,)) = (inline_texts(HTML)[tag] for tag in ("script", "style"))
    barred = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function"
    barred += r"|DOMParser|createContextualFragment|setHTML|setTimeout\(\s*[\"']"
    assert not re.findall(barred, script)
    assert not re.findall(r"localStorage|sessionStorage|indexedDB|cookie|location", script)
    assert not re.findall(r"expression\(|javascript:", script + style)


def test_sides_of_a_comparison_share_no_prompt_in_the_prefix_cache() -> None:
    """The second one would be timed without it."""
    ((script,),) = (inline_texts(HTML)["script"],)
    (compare,) = re.findall(r"async function compare\(\) {.*?\n}", script, flags=re.DOTALL)
    salted = compare.index("for (const body of bodies) body.cache_salt = `${Math.random()}`;")
    assert salted < compare.index("await write(bodies")


def test_every_input_has_a_label_and_every_reference_an_element() -> None:
    elements = Elements()
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    labelled = {attributes["for"] for attributes in elements.named("label")}
    boxes = elements.named("input", "select", "textarea")
    assert boxes
    assert {attributes.get("id") for attributes in boxes} == labelled
    for _, attributes in elements.found:
        for name in ("aria-labelledby", "aria-describedby", "for"):
            if name in attributes:
                assert attributes[name] in ids, attributes
    ((script,),) = (inline_texts(HTML)["script"],)
    sought = set(re.findall(r'\bfind\("([a-z-]+)"\)', script))
    assert sought
    assert sought <= set(ids)


# --- a browser


FLAGS = (
    *("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "disable-quic"),
    *("no-first-run", "no-default-browser-check", "disable-background-networking"),
    *("disable-component-update", "disable-sync", "no-proxy-server"),
)
PATIENCE_SECONDS = 20.0


@contextlib.contextmanager
def headless_chromium(profile: Path) -> Iterator[Any]:
    """Starts a browser with an empty profile, which asks nothing of the network by itself."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    browser = next(filter(None, map(shutil.which, names)), None)
    driver_path = shutil.which("chromedriver")
    assert browser, "Wanted chromium on the path: apt-get install chromium."
    assert driver_path, "Wanted chromedriver on the path: apt-get install chromium-driver."
    # Never looks for a driver elsewhere; talks to the driver on this machine directly.
    os.environ.update(SE_OFFLINE="true", SE_AVOID_STATS="true", NO_PROXY="127.0.0.1,localhost")
    # No import at the top: only these tests need the extra `browser`.
    webdriver = importlib.import_module("selenium.webdriver")
    service = importlib.import_module("selenium.webdriver.chrome.service").Service(driver_path)
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*FLAGS, f"user-data-dir={profile}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield driver
    finally:
        driver.quit()


@dataclasses.dataclass(frozen=True)
class Token:
    """A piece of an answer as it is shown."""

    text: str
    depth: int | None
    title: str
    background: str


TOKENS = """
return [...document.querySelectorAll(".answer .token")].map((token) => [
  token.textContent, token.dataset.depth ?? null, token.title,
  getComputedStyle(token).backgroundColor,
]);
"""


class Page:
    """The page of one server in a browser."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver, self.url = driver, url
        self.keys = importlib.import_module("selenium.webdriver.common.keys").Keys
        self.run, self.command = driver.execute_script, driver.execute_cdp_cmd
        for kind in ("browser", "performance"):
            driver.get_log(kind)
        driver.get(url)

    def element(self, name: str) -> Any:
        return self.driver.find_element("id", name)

    def text(self, name: str) -> str:
        return self.element(name).get_property("textContent")

    def shows(self, name: str) -> bool:
        return self.element(name).is_displayed()

    def write(self, name: str, text: str) -> None:
        """Replaces what stands in a box by what is typed."""
        box = self.element(name)
        box.clear()
        box.send_keys(text)

    def click(self, name: str) -> None:
        self.element(name).click()

    def press(self, *keys: str) -> None:
        """Presses keys together, wherever the focus is; the last one is let go first."""
        chains = importlib.import_module("selenium.webdriver.common.action_chains")
        chain = chains.ActionChains(self.driver)
        for key in keys[:-1]:
            chain.key_down(key)
        chain.send_keys(keys[-1])
        for key in keys[:-1]:
            chain.key_up(key)
        chain.perform()

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"Waited {PATIENCE_SECONDS:.0f} s in vain: {what}.")
            time.sleep(0.02)

    def most_tokens(self) -> int:
        return int(self.element("max-tokens").get_attribute("max") or 2048)

    def idle(self) -> bool:
        return self.element("generate").is_enabled()

    def generate(self, prompt: str, *, max_tokens: int = 24) -> None:
        self.write("max-tokens", str(max_tokens))
        self.write("prompt", prompt)
        self.click("generate")

    def tokens(self) -> list[Token]:
        return [
            Token(text, None if depth is None else int(depth), title, background)
            for text, depth, title, background in self.driver.execute_script(TOKENS)
        ]

    def complaints(self) -> list[str]:
        """Returns the console's messages since the last time, of any level."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def foreign_requests(self) -> list[str]:
        """Returns requests to elsewhere since the last time."""
        entries = self.driver.get_log("performance")
        messages = [json.loads(entry["message"])["message"] for entry in entries]
        sent = [x["params"] for x in messages if x["method"] == "Network.requestWillBeSent"]
        # The browser's first window shows a page of its own, which is no matter of ours.
        urls = [x["request"]["url"] for x in sent if "chrome://" not in x["documentURL"]]
        return [url for url in urls if urlsplit(url).netloc != urlsplit(self.url).netloc]


# --- in a browser: any server


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with headless_chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture(scope="module")
def served_url() -> Iterator[str]:
    """Where a server has its page: by default that of the shipped model with a depth per token."""
    if given := os.environ.get("UTIO_PAGE_URL"):
        yield given
        return
    shapes = Shapes(prompt_widths=(256,), groups=(1,), key_step=512)
    model = Serve(mode="adaptive").served()
    with running(model, slots=2, shapes=shapes) as server:
        yield server.url


@pytest.fixture
def page(chromium: Any, served_url: str) -> Iterator[Page]:
    """The page, with completions; afterwards no complaint in the console, no other host asked."""
    page = Page(chromium, served_url)
    page.wait(lambda: " · " in page.text("facts"), "the page names the model")
    if page.shows("chat"):
        page.click("chat")
    yield page
    complaints, foreign = page.complaints(), page.foreign_requests()
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    chromium.get("about:blank")
    assert complaints == foreign == []


@pytest.mark.browser
def test_each_depth_has_one_colour_of_its_own(page: Page) -> None:
    page.generate("def mean(", max_tokens=24)
    page.wait(lambda: page.idle() and page.tokens(), "an answer")
    assert not page.shows("wrong")
    tokens = page.tokens()
    assert all(token.depth for token in tokens)
    colours: dict[int | None, set[str]] = {}
    for token in tokens:
        colours.setdefault(token.depth, set()).add(token.background)
    assert all(len(shades) == 1 for shades in colours.values()), colours
    assert len(set.union(*colours.values())) == len(colours)
    layers = int(re.findall(r"(\d+) layers", page.text("facts"))[0])
    for token in tokens:
        assert token.title.startswith(f"{token.depth} of {layers} layers")
        assert "log-probability" in token.title
    assert page.shows("legend")
    titles = page.run("return [...document.querySelectorAll('.column')].map(each => each.title)")
    read = [re.fullmatch(rf"(\d+) tokens? at (\d+) of {layers} layers", title) for title in titles]
    shown = {int(match[2]): int(match[1]) for match in read if match}
    assert len(shown) == len(titles)
    assert {d: n for d, n in shown.items() if n} == Counter(token.depth for token in tokens)


@pytest.mark.browser
def test_the_keyboard_generates_stops_and_reads_depths(page: Page) -> None:
    page.write("max-tokens", str(page.most_tokens() // 2))
    page.write("prompt", "def mean(")
    page.press(page.keys.CONTROL, page.keys.ENTER)
    page.wait(page.tokens, "the first tokens")
    page.press(page.keys.ESCAPE)
    page.wait(page.idle, "the end")
    assert page.text("finish") == "stopped"
    assert page.run("return document.activeElement.id") == "prompt"
    assert page.element("prompt").get_property("value") == "def mean("
    page.run("document.getElementById('answers').focus()")
    tokens = page.tokens()
    right, left = page.keys.ARROW_RIGHT, page.keys.ARROW_LEFT
    for key, index in ((right, 0), (right, 1), (left, 0), (left, 0)):
        page.press(key)
        assert page.run("return document.activeElement.textContent") == tokens[index].text
        assert page.text("readout").endswith(tokens[index].title)


@pytest.mark.browser
@pytest.mark.parametrize("width", [320, 1400])
def test_nothing_is_wider_than_the_window(page: Page, width: int) -> None:
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    page.command("Emulation.setDeviceMetricsOverride", metrics)
    page.generate("word" * 100, max_tokens=48)
    page.wait(lambda: page.idle() and page.tokens(), "an answer")
    assert page.run("return innerWidth") == width
    assert page.run("return document.documentElement.scrollWidth") <= width
    panel = "const panel = document.getElementById('answers'); "
    assert page.run(panel + "return panel.scrollWidth <= panel.clientWidth")
