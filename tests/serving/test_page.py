# SPDX-License-Identifier: Apache-2.0
"""The page of the server: what its file may hold, and what a person meets in a real browser.

Tests with the marker `browser` drive a headless Chromium (`make test-browser`). Those that take
`page` ask nothing of the server but its protocol, so they run against the real one, or against a
server that runs already: UTIO_PAGE_URL=http://127.0.0.1:8000/ make test-browser.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
from helpers.browser import Page, Token, headless_chromium
from helpers.page_server import (
    PAGE,
    StandIn,
    inline_texts,
    refusal_body,
    stand_in_server,
    text_chunk,
    usage_chunk,
)
from helpers.serving import running

from utio_jax.cli.serve import Serve
from utio_jax.engine import Shapes
from utio_jax.serving.app import _page_policy

HTML = PAGE.read_text()
NOTHING = "\u2013"  # What a figure says before there is one.


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


# --- in a browser: any server


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with headless_chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture
def expected() -> list[str]:
    """Patterns of the console's messages; a test adds those it provokes."""
    return []


@pytest.fixture
def open_page(chromium: Any, expected: list[str]) -> Iterator[Callable[[str], Page]]:
    """Opens pages; afterwards the console has no complaint and no other host was asked."""
    pages: list[Page] = []

    def opened(url: str) -> Page:
        pages.append(Page(chromium, url))
        return pages[-1]

    yield opened
    complaints, foreign = pages[-1].complaints(), pages[-1].foreign_requests()
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    chromium.get("about:blank")
    assert [text for text in complaints if not any(re.search(e, text) for e in expected)] == []
    for pattern in expected:
        assert any(re.search(pattern, text) for text in complaints), pattern
    assert foreign == []


@pytest.fixture(scope="module")
def served_url() -> Iterator[str]:
    """Where a server has its page: by default that of the shipped model with a depth per token."""
    if given := os.environ.get("UTIO_PAGE_URL"):
        yield given
        return
    shapes = Shapes(prompt_widths=(256,), groups=(1,), key_step=512)
    model = Serve(mode="adaptive").served()
    with running(model, slots=2, capacity=1024, shapes=shapes) as server:
        yield server.url


@pytest.fixture
def page(open_page: Callable[[str], Page], served_url: str) -> Page:
    """The page of any server, with completions rather than a chat."""
    page = open_page(served_url)
    page.wait_for_model()
    if page.shows("chat"):
        page.click("chat")
    return page


def colours_of(tokens: list[Token]) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for token in tokens:
        assert token.depth is not None, token
        found.setdefault(token.depth, set()).add(token.background)
    return found


@pytest.mark.browser
def test_each_depth_has_one_colour_of_its_own(page: Page) -> None:
    page.generate("def mean(", max_tokens=24)
    page.wait(lambda: page.idle() and page.tokens(), "an answer")
    assert not page.shows("wrong")
    tokens = page.tokens()
    colours = colours_of(tokens)
    assert all(len(each) == 1 for each in colours.values()), colours
    assert len(set.union(*colours.values())) == len(colours)
    layers = int(re.findall(r"(\d+) layers", page.text("facts"))[0])
    for token in tokens:
        assert token.title.startswith(f"{token.depth} of {layers} layers")
        assert "log-probability" in token.title
    assert page.shows("legend")
    titles = page.run("return [...document.querySelectorAll('.column')].map(each => each.title)")
    read = [re.fullmatch(rf"(\d+) tokens? at (\d+) of {layers} layers", each) for each in titles]
    shown = {int(each[2]): int(each[1]) for each in read if each}
    assert len(shown) == len(titles)
    assert {d: n for d, n in shown.items() if n} == Counter(token.depth for token in tokens)


@pytest.mark.browser
def test_the_keyboard_generates_stops_and_reads_depths(page: Page) -> None:
    page.write("max-tokens", str(page.many_tokens()))
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
@pytest.mark.parametrize("width", [320, 375, 700, 1400])
def test_nothing_is_wider_than_the_window(page: Page, width: int) -> None:
    page.command(
        "Emulation.setDeviceMetricsOverride",
        width=width, height=800, deviceScaleFactor=1, mobile=width < 600,
    )  # fmt: skip
    page.generate("word" * 100, max_tokens=48)
    page.wait(lambda: page.idle() and page.tokens(), "an answer")
    assert page.run("return innerWidth") == width
    assert page.run("return document.documentElement.scrollWidth") <= width
    panel = "const panel = document.getElementById('answers'); "
    assert page.run(panel + "return panel.scrollWidth <= panel.clientWidth")


# --- in a browser: what only the stand-in does


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    with stand_in_server() as server:
        yield server


@pytest.fixture
def visit(open_page: Callable[[str], Page], stand_in: StandIn) -> Callable[[], Page]:
    """Opens the stand-in's page once the test has configured it."""

    def visited() -> Page:
        page = open_page(stand_in.url)
        page.wait_for_model()
        return page

    return visited


@pytest.fixture
def clock(chromium: Any) -> Iterator[Callable[[float], None]]:
    """Stops the clock of pages opened from now on; a call sets it, in seconds."""
    frozen = "window.testClock = 0; performance.now = () => 1000 * window.testClock;"
    made = chromium.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": frozen})
    yield lambda now: chromium.execute_script(f"window.testClock = {now}")
    chromium.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", made)


@pytest.mark.browser
def test_figures_follow_the_clock_and_the_depths(
    stand_in: StandIn, clock: Callable[[float], None], visit: Callable[[], Page]
) -> None:
    page = visit()
    stand_in.take_over()
    clock(10.0)
    page.generate("def", max_tokens=6)
    page.wait(lambda: stand_in.asked, "the request")
    assert [page.text(name) for name in ("rate", "depth", "first", "tokens")] == [NOTHING] * 4

    clock(10.25)  # The first two tokens after a quarter of a second.
    stand_in.send_text("a", "b", depths=(4, 16))
    page.wait(lambda: page.answer() == "ab", "two tokens")
    assert page.text("first") == "250 ms"
    assert page.text("tokens") == "2"
    assert page.text("depth") == "10.0"
    assert (page.text("rate"), page.text("rate-note")) == ("8.0", "with the prompt")

    clock(10.75)  # Then two in half a second: four a second; the quarter belongs to the prompt.
    stand_in.send_text("c", "", depths=(8, 8))
    page.wait(lambda: page.text("tokens") == "4", "four tokens, one without text")
    assert page.answer() == "abc"
    assert page.text("depth") == "9.0"
    assert (page.text("rate"), page.text("rate-note")) == ("4.0", "after the first")
    assert page.text("finish") == NOTHING
    assert page.element("columns").get_attribute("aria-label") == (
        "1 token at 4 of 16 layers, 2 tokens at 8 of 16 layers, 1 token at 16 of 16 layers"
    )

    clock(11.75)
    stand_in.send_text("d", "e", depths=(1, 2), finish_reason="length")
    clock(15.0)  # What comes after the last token slows nothing.
    about = {"mean_depth_decided": 6.75, "mean_depth_executed": 8.25, "seconds_in_queue": 0.125}
    stand_in.send(usage_chunk(1200, 6, **about))
    stand_in.end(done=True)
    page.wait(page.idle, "the end")
    assert page.answer() == "abcde"
    assert page.text("first-note") == "125 ms in the queue"
    assert (page.text("tokens"), page.text("tokens-note")) == ("6", "after 1,200 of prompt")
    assert (page.text("depth"), page.text("depth-note")) == ("6.8", "of 16; 8.3 executed")
    assert (page.text("finish"), page.text("finish-note")) == ("length", "as long as allowed")


@pytest.mark.browser
def test_depths_of_many_layers_have_as_many_colours(
    stand_in: StandIn, visit: Callable[[], Page]
) -> None:
    page = visit()
    stand_in.take_over()
    page.generate("def")
    stand_in.send_text(*"abcdefghijklmnop", depths=(*range(1, 17),), finish_reason="length")
    stand_in.end(done=True)
    page.wait(page.idle, "the end")
    colours = colours_of(page.tokens())
    assert len(set.union(*colours.values())) == len(colours) == 16


@pytest.mark.browser
def test_a_stream_may_be_cut_anywhere(stand_in: StandIn, visit: Callable[[], Page]) -> None:
    page = visit()
    stand_in.take_over()
    page.generate("def")
    first = b'data: {"choices":[{"text":"a","utio":{"pieces":["a"],"depths":[1]}}]}\n\n'
    chunk = b'data: {"choices":[{"text":"\xc3\xa9 \xf0\x9f\x8c\xb1","finish_reason":"stop",'
    chunk += b'"utio":{"pieces":["\xc3\xa9"," \xf0\x9f\x8c\xb1"],"depths":[2,3]}}]}\r\n\r\n'
    # In a letter of two bytes, in one of four, in the line's end, and between the two ends.
    cuts = (chunk.index(b"\xa9"), chunk.index(b"\x8c"), len(chunk) - 3, len(chunk) - 2)
    for number, cut in enumerate(cuts, start=1):
        stand_in.send_bytes(first + chunk[:cut])
        # What came before the cut has been read, so the rest cannot come with it.
        shown = "aé \N{SEEDLING}" * (number - 1) + "a"
        page.wait(lambda shown=shown: page.answer() == shown, "what is complete")
        stand_in.send_bytes(chunk[cut:])
        page.wait(lambda shown=shown: page.answer() != shown, "the rest")
    stand_in.send_bytes(b"data:[DONE]\n\n")
    stand_in.end()
    page.wait(page.idle, "the end")
    shown = [(token.text, token.depth) for token in page.tokens()]
    assert shown == [("a", 1), ("é", 2), (" \N{SEEDLING}", 3)] * len(cuts)


@pytest.mark.browser
def test_stop_closes_the_connection(stand_in: StandIn, visit: Callable[[], Page]) -> None:
    page = visit()
    stand_in.take_over()
    page.generate("def", max_tokens=1000)
    stand_in.send_text(" one", depths=(3,))
    page.wait(page.tokens, "the first piece")
    assert not stand_in.left.is_set()
    page.click("stop")
    assert stand_in.left.wait(10)
    page.wait(page.idle, "the end")
    assert page.answer() == " one"
    assert (page.text("finish"), page.text("finish-note")) == ("stopped", "by you")
    assert not page.shows("wrong")


@pytest.mark.browser
def test_what_the_model_writes_is_text(stand_in: StandIn, visit: Callable[[], Page]) -> None:
    # Without the policy, which would stop a script by itself.
    stand_in.policy = False
    stand_in.models[0]["id"] = "<b>bold</b>"
    page = visit()
    stand_in.take_over()
    attack = "<img src='x' onerror='window.broken = 1'>"
    page.generate(attack)
    pieces = (attack, "<script>window.broken = 1</script>", "</span></p><b>bold</b>", "&lt;")
    stand_in.send_text(*pieces, depths=(1, 2, 3, 4))
    stand_in.send({"error": {"message": attack, "type": attack}})
    stand_in.end()
    page.wait(page.idle, "the end")
    assert page.answer() == "".join(pieces)
    assert page.text("completion") == attack + "".join(pieces)
    assert page.text("wrong-message") == attack
    assert page.text("name") == "<b>bold</b>"
    assert page.run("return document.querySelectorAll('img, b, main script').length") == 0
    assert page.run("return window.broken === undefined")


@pytest.mark.browser
def test_an_error_in_mid_stream_is_shown(stand_in: StandIn, visit: Callable[[], Page]) -> None:
    page = visit()
    stand_in.take_over()
    page.generate("def")
    stand_in.send_text(" one", depths=(3,))
    error = {"message": "The engine stopped.", "type": "server_error", "param": None}
    stand_in.send({"error": {**error, "code": "engine"}})
    stand_in.end()
    page.wait(page.idle, "the end")
    assert page.shows("wrong")
    assert page.text("wrong-message") == "The engine stopped."
    assert page.text("wrong-detail") == "server_error · code: engine"
    assert page.answer() == " one"
    assert page.text("finish") == "error"

    page.click("generate")  # The next answer takes the error away.
    page.wait(lambda: len(stand_in.asked) == 2, "the request")
    assert not page.shows("wrong")
    assert page.answer() == ""
    stand_in.send_text(" two", depths=(3,), finish_reason="stop")
    stand_in.end()  # No [DONE]: the connection was cut.
    page.wait(page.idle, "the end")
    assert page.text("wrong-message") == "The stream ended before the answer was complete."


@pytest.mark.browser
def test_a_refused_request_says_why(
    stand_in: StandIn, visit: Callable[[], Page], expected: list[str]
) -> None:
    expected += ["status of 429", "status of 502"]
    page = visit()
    body = refusal_body("Wanted room in the queue.", type="overloaded", param="max_tokens")
    stand_in.refusal = (429, {"Retry-After": "3"}, body)
    page.generate("def")
    page.wait(lambda: page.shows("wrong"), "the error")
    assert page.text("wrong-message") == "Wanted room in the queue."
    assert page.text("wrong-detail") == "overloaded · param: max_tokens · try again in 3 s"
    assert page.idle()
    stand_in.refusal = (502, {}, b"<html>Bad gateway</html>")
    page.click("generate")
    page.wait(lambda: "502" in page.text("wrong-message"), "the error")
    assert "html" not in page.text("wrong-message")


@pytest.mark.browser
def test_a_server_that_is_gone_is_named(
    stand_in: StandIn, visit: Callable[[], Page], expected: list[str]
) -> None:
    expected.append("ERR_FAILED|ERR_INTERNET_DISCONNECTED|ERR_CONNECTION_REFUSED")
    page = visit()
    nothing = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.command("Network.enable")
    page.command("Network.emulateNetworkConditions", offline=True, **nothing)
    try:
        page.generate("def")
        page.wait(lambda: page.shows("wrong"), "the error")
    finally:
        page.command("Network.emulateNetworkConditions", offline=False, **nothing)
    assert page.text("wrong-message") == "The server does not answer. Is it still running?"
    assert stand_in.asked == []


@pytest.mark.browser
def test_a_key_is_asked_for_when_the_server_wants_one_and_is_not_kept(
    stand_in: StandIn, open_page: Callable[[str], Page], expected: list[str]
) -> None:
    expected.append("status of 401")
    stand_in.key = "first secret"
    page = open_page(stand_in.url)
    page.wait(lambda: page.shows("key"), "the box for the key")
    page.write("key", "wrong")
    page.press(page.keys.ENTER)
    page.wait(lambda: "did not accept" in page.text("key-hint"), "the wrong key to be refused")
    assert page.shows("key")
    page.write("key", "first secret")
    page.press(page.keys.ENTER)
    page.wait_for_model()
    assert not page.shows("key")

    stand_in.key = "second secret"  # Asked for again in the middle, and the request goes on.
    page.generate("def", max_tokens=4)
    page.wait(lambda: page.shows("key"), "the box for the key")
    assert stand_in.asked == []
    page.write("key", "second secret")
    page.press(page.keys.ENTER)
    page.wait(lambda: page.idle() and page.tokens(), "the answer")
    assert [asked.key for asked in stand_in.asked] == ["second secret"]
    assert stand_in.asked[0].body["prompt"] == "def"
    assert not page.shows("key")

    stand_in.key = "third secret"
    page.click("generate")
    page.wait(lambda: page.shows("key"), "the box for the key")
    stand_in.key = None  # A server that asks for none any more: the empty box goes.
    page.click("generate")
    page.wait(lambda: len(stand_in.asked) == 2 and page.idle(), "the answer")
    assert not page.shows("key")
    stand_in.key = "third secret"

    kept = "return JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])"
    assert "secret" not in page.run(kept)
    assert "secret" not in page.driver.page_source
    page.driver.refresh()
    page.wait(lambda: page.shows("key"), "the box for the key, since nothing was kept")


@pytest.mark.browser
def test_the_request_says_what_the_boxes_say(stand_in: StandIn, visit: Callable[[], Page]) -> None:
    page = visit()
    page.generate("def", max_tokens=4)
    page.wait(lambda: page.idle() and page.tokens(), "an answer")
    assert page.text("budget-value") == "0.6"
    page.write("temperature", "0")
    page.write("seed", "17")
    page.element("budget").send_keys(page.keys.HOME)
    assert page.text("budget-value") == "0.4"
    page.element("prompt-budget").send_keys("1")
    page.write("prompt", "x =")
    page.click("generate")
    page.wait(lambda: len(stand_in.asked) == 2 and page.idle(), "an answer")
    first, second = (asked.body for asked in stand_in.asked)
    assert first == {
        "model": "stand-in-16",
        "prompt": "def",
        "max_tokens": 4,
        "temperature": 0.7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": 1,
        "utio": {"budget": 0.6, "prompt_budget": 0.5, "depths": True},
    }
    assert second == first | {
        "prompt": "x =",
        "temperature": 0,
        "seed": 17,
        "utio": {"budget": 0.4, "prompt_budget": 1, "depths": True},
    }
    page.press_label("mode-plain")
    assert not page.element("budget").is_enabled()
    page.click("generate")
    page.wait(lambda: len(stand_in.asked) == 3 and page.idle(), "an answer")
    assert stand_in.asked[2].body["utio"] == {"mode": "plain", "prompt_budget": 1, "depths": True}
    assert not page.element("mode-lossless").is_enabled()


@pytest.mark.browser
def test_what_requests_get_by_default_is_chosen_and_why_is_said(
    stand_in: StandIn, visit: Callable[[], Page]
) -> None:
    stand_in.models[0]["utio"]["default_mode"] = "plain"
    stand_in.plan = "With all 8 slots busy, a budget of 0.6 is predicted to be slower."
    page = visit()
    page.wait(lambda: page.text("state") == "Ready", "the state")
    assert page.element("mode-plain").is_selected()
    assert page.text("modes-hint") == stand_in.plan
    page.generate("def", max_tokens=4)
    page.wait(lambda: page.idle() and page.tokens(), "an answer")
    assert stand_in.asked[0].body["utio"]["mode"] == "plain"


@pytest.mark.browser
@pytest.mark.parametrize("chat", [False, True])
def test_two_answers_are_compared(
    stand_in: StandIn, visit: Callable[[], Page], clock: Callable[[float], None], chat: bool
) -> None:
    stand_in.models[0]["utio"] |= {"chat": chat, "exits": [4, 8, 16]}
    page = visit()
    stand_in.take_over()
    clock(0.0)
    page.write("prompt", "def")
    page.click("compare")
    answers = [(("a", "b", "c", "d"), (16,) * 4, 2.0), (("a", "x", "c", "d"), (4, 8, 4, 8), 4.0)]
    for number, (pieces, depths, now) in enumerate(answers, start=1):
        page.wait(lambda number=number: len(stand_in.asked) == number, "the request")
        clock(now if number == 1 else 3.0)
        stand_in.send(text_chunk(pieces, depths, chat=chat, finish_reason="stop"))
        stand_in.send(usage_chunk(1, 4, mean_depth_decided=sum(depths) / 4))
        stand_in.end(done=True)
    page.wait(page.idle, "both answers")
    full, adaptive = (asked.body for asked in stand_in.asked)
    assert full["utio"]["mode"] == "plain"
    assert adaptive["utio"]["budget"] == 0.6
    assert full["seed"] == adaptive["seed"]
    # Two seconds in full, one second by depths; three of four tokens are there in this order.
    assert page.text("verdict") == "2.0 x, 6.0 of 16 layers, 75 % the same"
    changed = "return [...document.querySelectorAll('.changed')].map((each) => each.textContent)"
    assert page.run(changed) == ["b", "x"]
    assert page.run("return document.querySelectorAll('.column').length") == 3, "exits alone"
    assert page.element("prompt").get_property("value") == "def"
    if chat:  # What was compared is no part of the conversation.
        page.generate("more")
        page.wait(lambda: len(stand_in.asked) == 3, "the request")
        assert stand_in.asked[2].body["messages"] == [{"role": "user", "content": "more"}]
        assert not page.shows("pair")
        page.click("stop")


@pytest.mark.browser
def test_examples_are_filled_in_and_requests_can_be_copied(
    stand_in: StandIn, visit: Callable[[], Page]
) -> None:
    page = visit()
    chips = page.driver.find_elements("css selector", "#examples button")
    assert len(chips) == 4
    chips[0].click()
    assert page.element("prompt").get_property("value") == 'if __name__ == "__main__":\n    '
    page.run("navigator.clipboard.writeText = (text) => { window.copied = text; }")
    page.write("prompt", "it's None")
    page.click("copy-curl")
    page.wait(lambda: page.run("return window.copied"), "the command")
    arguments = shlex.split(page.run("return window.copied"))
    assert arguments[:2] == ["curl", f"{stand_in.url}v1/completions"]
    body = json.loads(arguments[-1])
    assert body["prompt"] == "it's None"
    assert "stream" not in body
    page.run("window.copied = ''")
    page.click("copy-python")
    page.wait(lambda: page.run("return window.copied"), "the program")
    program = page.run("return window.copied")
    (call,) = [
        node
        for node in ast.walk(ast.parse(program))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "client.completions.create"
    ]
    given = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
    assert given.pop("extra_body") == {"utio": body.pop("utio")}
    assert given == body
    (client,) = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Call)
                 and ast.unparse(node.func) == "OpenAI"]  # fmt: skip
    assert ast.literal_eval(client.keywords[0].value) == f"{stand_in.url}v1"


@pytest.mark.browser
def test_the_page_waits_for_a_server_that_compiles(
    stand_in: StandIn, visit: Callable[[], Page], expected: list[str]
) -> None:
    expected.append("503")
    stand_in.warming = ["Not ready: compiling, 12 of 31 programs."] * 2
    page = visit()
    page.wait(lambda: page.text("state") == "Compiling 12 of 31", "how far it is")
    assert not page.element("generate").is_enabled()
    page.wait(lambda: page.text("state") == "Ready", "the end of it")
    assert page.element("generate").is_enabled()


@pytest.mark.browser
def test_a_chat_is_kept_until_a_new_one_is_begun(
    stand_in: StandIn, visit: Callable[[], Page]
) -> None:
    stand_in.models[0]["utio"]["chat"] = True
    page = visit()
    stand_in.take_over()
    assert page.shows("chat")
    assert page.element("chat").is_selected()

    def turn(message: str, reply: str) -> Any:
        number = len(stand_in.asked)
        page.generate(message)
        page.wait(lambda: len(stand_in.asked) > number, "the request")
        stand_in.send({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
        stand_in.send_text(reply, depths=(5,), chat=True, finish_reason="stop")
        stand_in.end(done=True)
        page.wait(page.idle, "the end")
        assert stand_in.asked[-1].path == "/v1/chat/completions"
        assert stand_in.asked[-1].body["logprobs"] is True
        assert page.element("prompt").get_property("value") == ""
        return stand_in.asked[-1].body["messages"]

    first = [{"role": "user", "content": "Hello"}]
    assert turn("Hello", "Hi.") == first
    first += [{"role": "assistant", "content": "Hi."}, {"role": "user", "content": "More"}]
    assert turn("More", "No.") == first
    assert page.text("conversation") == "YouHellostand-in-16Hi.YouMorestand-in-16No."

    # What was stopped before a word came is not part of it, and can be said again.
    page.generate("Wait")
    page.wait(lambda: len(stand_in.asked) == 3, "the request")
    page.click("stop")
    page.wait(page.idle, "the end")
    assert page.element("prompt").get_property("value") == "Wait"
    assert "Wait" not in page.text("conversation")

    page.click("chat")  # Completions in between have no part in it either.
    assert not page.shows("conversation")
    page.generate("def")
    page.wait(lambda: len(stand_in.asked) == 4, "the request")
    assert stand_in.asked[-1].path == "/v1/completions"
    stand_in.send_text(" x", depths=(3,))
    stand_in.end(done=True)
    page.wait(page.idle, "the end")
    page.click("chat")
    assert page.shows("conversation")
    page.click("anew")
    assert page.text("conversation") == ""
    assert turn("Again", "Yes.") == [{"role": "user", "content": "Again"}]
