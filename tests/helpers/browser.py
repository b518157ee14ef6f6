# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, and the server's page in it as a person meets it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-proxy-server",
)
PATIENCE_SECONDS = 20.0


@contextlib.contextmanager
def headless_chromium(profile: Path) -> Iterator[Any]:
    """Starts a browser with an empty profile, which asks nothing of the network by itself."""
    browser = next(filter(None, map(shutil.which, _CHROMIUM)), None)
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
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
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


_TOKENS = """
return [...document.querySelectorAll(".answer .token")].map((token) => [
  token.textContent, token.dataset.depth ?? null, token.title,
  getComputedStyle(token).backgroundColor,
]);
"""


class Page:
    """The page of one server in a browser.

    `complaints` and `foreign_requests` are what the console and the network saw since then.
    """

    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        self.url = url
        self.keys = importlib.import_module("selenium.webdriver.common.keys").Keys
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

    def press_label(self, name: str) -> None:
        self.driver.find_element("css selector", f"label[for={name}]").click()

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

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def command(self, name: str, **parameters: Any) -> Any:
        return self.driver.execute_cdp_cmd(name, parameters)

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"Waited {PATIENCE_SECONDS:.0f} s in vain: {what}.")
            time.sleep(0.02)

    def wait_for_model(self) -> None:
        """Waits until the page knows the server's model."""
        self.wait(lambda: " · " in self.text("facts"), "the page names the model")

    def many_tokens(self) -> int:
        return int(self.element("max-tokens").get_attribute("max") or 2048) // 2

    def idle(self) -> bool:
        return self.element("generate").is_enabled()

    def generate(self, prompt: str, *, max_tokens: int = 24) -> None:
        self.write("max-tokens", str(max_tokens))
        self.write("prompt", prompt)
        self.click("generate")

    def tokens(self) -> list[Token]:
        return [
            Token(text, None if depth is None else int(depth), title, background)
            for text, depth, title, background in self.run(_TOKENS)
        ]

    def answer(self) -> str:
        return "".join(token.text for token in self.tokens())

    def complaints(self) -> list[str]:
        """Returns the console's messages since the last time, of any level."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def foreign_requests(self) -> list[str]:
        """Returns requests to elsewhere since the last time."""
        messages = [
            json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")
        ]
        asked = [
            message["params"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]
        # The browser's first window shows a page of its own, which is no matter of ours.
        urls = [each["request"]["url"] for each in asked if "chrome://" not in each["documentURL"]]
        own = urlsplit(self.url).netloc
        return [url for url in urls if urlsplit(url).netloc != own]
