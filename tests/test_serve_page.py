"""The chat page in a headless Chromium, as a person uses it. Skipped where no browser is installed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from serving import Server, serving

webdriver = pytest.importorskip("selenium.webdriver")

from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium and chromedriver are installed here")

# wisp goes on for long with these, and always says the same
LONG = {"temperature": "1", "top_k": "0", "top_p": "1", "seed": "1"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("-c", "2048") as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--window-size=1200,800",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield browser
    browser.quit()


class Page:
    """What a person sees and does."""

    def __init__(self, browser: Any, url: str) -> None:
        self.browser = browser
        browser.get(url)
        browser.execute_script("localStorage.clear(); sessionStorage.clear()")
        self.reload()

    def reload(self) -> None:
        self.browser.refresh()
        self.until(lambda: self.text("#facts"))

    def until(self, met: Callable[[], Any]) -> Any:
        return WebDriverWait(self.browser, 60, 0.02).until(lambda _: met())

    def find(self, selector: str) -> list[Any]:
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return " ".join(node.text for node in self.find(selector))

    def click(self, selector: str) -> None:
        self.find(selector)[-1].click()

    def set(self, **settings: str) -> None:
        self.browser.execute_script("localStorage['warpsmith.settings'] = arguments[0]", json.dumps(settings))
        self.reload()

    def send(self, text: str, wait: bool = True) -> None:
        self.find("#input")[0].send_keys(text, Keys.ENTER)
        if wait:
            self.finished()

    def finished(self) -> None:
        self.until(lambda: self.find("#send[aria-label=Send]") and self.find(".message.assistant .acts"))

    def answers(self) -> list[str]:
        return [node.text for node in self.find(".message.assistant .answer")]

    def run(self, script: str, *args: Any) -> Any:
        return self.browser.execute_script(script, *args)


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Page]:
    browser.get_log("browser")
    page = Page(browser, server.url)
    yield page
    assert [
        entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE" and entry["source"] != "network"
    ] == []


def test_a_question_is_answered_and_kept(page: Page) -> None:
    page.send("Write a function that adds two numbers.")
    (answer,) = page.answers()
    assert "def " in answer
    assert "tok/s" in page.text(".message.assistant .note")
    assert "tok/s" in page.text("#speed")
    assert len(page.find("#bars span")) > 3
    assert page.text("#title") == "Write a function that adds two numbers."
    page.reload()
    assert page.answers() == [answer]


def test_an_answer_streams_and_can_be_stopped(page: Page) -> None:
    page.set(**LONG)
    page.send("Write a long story about functions.", wait=False)
    first = page.until(lambda: page.find("#send[aria-label=Stop]") and page.text(".answer"))
    page.until(lambda: len(page.text(".answer")) > len(first))
    page.click("#send")
    page.finished()
    assert "stopped" in page.text(".message.assistant .note")
    assert page.text(".answer")


def test_an_answer_can_be_had_again_and_a_question_edited(page: Page) -> None:
    page.send("Write a function that adds two numbers.")
    before = page.answers()
    page.click("[aria-label=Regenerate]")
    page.finished()
    assert page.answers() == before  # greedy: the same question has the same answer
    page.send("Go on.")
    assert len(page.answers()) == 2
    page.find("[aria-label=Edit]")[0].click()
    box = page.find(".editing textarea")[0]
    box.clear()
    box.send_keys("Write a class for a stack.", Keys.ENTER)
    page.finished()
    assert page.text(".message.user .text") == "Write a class for a stack."
    assert len(page.answers()) == 1
    assert page.answers() != before


def test_several_conversations_are_kept_apart(page: Page) -> None:
    page.send("First question?")
    first = page.answers()
    page.click("#new")
    assert page.answers() == []
    page.send("Second question?")
    assert page.text("#list .current") == "Second question?"
    page.find("#list .pick")[1].click()
    assert page.text(".message.user .text") == "First question?"
    assert page.answers() == first
    page.reload()
    assert [node.text for node in page.find("#list .pick")] == ["Second question?", "First question?"]
    page.find("#list .drop")[0].click()
    assert page.text("#list .pick") == "First question?"


def test_settings_reach_the_server(page: Page, server: Server) -> None:
    page.click("#open-settings")
    page.find("[name=max_tokens]")[0].send_keys("5")
    page.find("[name=system]")[0].send_keys("Be short.")
    page.click("#settings .primary")
    page.send("Write a function that adds two numbers.")
    assert page.text(".message.assistant .note").startswith("5 tokens")
    assert "cut at the limit" in page.text(".message.assistant .note")


def test_a_refusal_is_shown(page: Page) -> None:
    page.run("document.getElementById('input').value = arguments[0]", "word " * 3000)
    page.send("")
    assert "context of 2048" in page.text(".failure")


def test_what_a_model_writes_never_becomes_markup(page: Page) -> None:
    page.send("Hello?")
    evil = (
        "# Title\n\n**bold** `code` <img src=x onerror=alert(1)> [x](javascript:alert(1)) [ok](https://example.org)\n\n"
        "1. one\n   - inner\n2. two\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\ndef f(): pass  # note\n```\n"
    )
    page.run(
        "const c = JSON.parse(localStorage['warpsmith.conversations']); c[0].messages[1].content = arguments[0];"
        "c[0].messages[1].reasoning = 'hm'; localStorage['warpsmith.conversations'] = JSON.stringify(c)",
        evil,
    )
    page.reload()
    assert page.find(".answer img") == []
    assert [node.get_attribute("href") for node in page.find(".answer a")] == ["https://example.org/"]
    for selector, text in (
        ("h1", "Title"),
        ("strong", "bold"),
        ("ol ul li", "inner"),
        ("th", "a b"),
        ("pre", "def f(): pass  # note"),
        ("pre .tok-c", "# note"),
    ):
        assert page.text(f".answer {selector}") == text
    assert "<img src=x" in page.text(".answer")
    assert not page.find(".thoughts")[0].get_attribute("open")


def test_dark_and_light(page: Page) -> None:
    def background() -> str:
        return page.run("return getComputedStyle(document.body).backgroundColor")

    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    light = background()
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    try:
        assert background() != light  # as the system says
        page.click("#theme")
        assert background() == light  # as the person says
        page.reload()
        assert background() == light
    finally:
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    page.click("#theme")
    assert background() != light


def test_a_narrow_screen(page: Page) -> None:
    page.browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    )
    try:
        page.send("Write a function with a_very_long_name_" + "x" * 200)
        assert page.run("return document.documentElement.scrollWidth") == 360
        for selector in ("#send", "#menu", "#open-settings", ".message.assistant .acts"):
            box = page.find(selector)[-1].rect
            assert box["x"] >= 0, selector
            assert box["x"] + box["width"] <= 360, selector
        assert not page.find("#new")[0].is_displayed()
        page.click("#menu")
        page.until(lambda: page.find("#new")[0].is_displayed())
        page.find("body")[0].send_keys(Keys.ESCAPE)
        page.until(lambda: not page.find("#new")[0].is_displayed())
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_everything_has_a_name_for_those_who_do_not_see_it(page: Page) -> None:
    page.send("Hello?")
    nameless = page.run(
        "return [...document.querySelectorAll('button, input, textarea, select')].filter(node =>"
        " !(node.getAttribute('aria-label') || node.textContent.trim() || node.labels?.length)).map(n => n.outerHTML)"
    )
    assert nameless == []
    assert page.text("[role=status]") or page.run("return document.querySelector('[role=status]').textContent")


def test_a_key_is_asked_for_and_forgotten_with_the_tab(browser: Any) -> None:
    with serving("-c", "512", "--api-key", "secret") as server:
        page = Page(browser, server.url)
        page.until(lambda: page.find("#settings[open]"))
        page.find("[name=key]")[0].send_keys("secret")
        page.click("#settings .primary")
        page.until(lambda: "wisp" in page.text("#facts"))
        page.send("Hello?")
        assert page.answers()
        assert "secret" not in page.run("return JSON.stringify(localStorage)")


def test_the_page_is_locked_down(server: Server) -> None:
    status, html, headers = server.ask("/")
    assert status == 200
    assert "http://" not in html.replace("http://www.w3.org/2000/svg", "")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for name in ("app.js", "style.css"):
        assert server.ask(f"/page/{name}")[0] == 200
    for name in ("../app.py", "..%2Fapp.py", "nothing.js", ""):
        assert server.ask(f"/page/{name}")[0] in (404, 307)
