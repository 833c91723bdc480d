"""Tests of the page for people, in a real browser."""

import json
import shutil
import time

import pytest

from serve import AllowedOrigins
from tests.helpers import FOX, TALES, Server

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
in_browser = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="the page is tested where a Chromium and its driver are found"
)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1200,800"
)


class Page:
    """The page in a browser, and the elements that a person sees."""

    def __init__(self, url: str, phone: bool = False):
        from selenium import webdriver

        options = webdriver.ChromeOptions()
        options.binary_location = BROWSER
        for flag in FLAGS.split():
            options.add_argument(flag)
        # without its question whether to keep the key, which would take what is typed
        options.add_experimental_option("prefs", {"credentials_enable_service": False})
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        if phone:
            screen = {"width": 390, "height": 800, "pixelRatio": 2}
            options.add_experimental_option("mobileEmulation", {"deviceMetrics": screen})
        self.driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
        self.driver.get(url)

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.driver.quit()

    def all(self, selector: str) -> list:
        found = self.driver.find_elements("css selector", selector)
        return [element for element in found if element.is_displayed()]

    def one(self, selector: str):
        [element] = self.all(selector)
        return element

    def texts(self, selector: str = ".said") -> list[str]:
        # at once, since an answer that grows is drawn anew
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.innerText)"
        return [text.strip() for text in self.run(script, selector)]

    def click(self, text: str) -> None:
        """Click the last button with this text."""
        [b for b in self.all("button") if b.text == text][-1].click()

    def until(self, condition, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "what was expected has not happened"
            time.sleep(0.05)

    def answered(self) -> None:
        self.until(lambda: self.all("#send"))

    def say(self, text: str) -> None:
        self.one("#message").send_keys(text + "\n")

    def run(self, script: str, *arguments):
        return self.driver.execute_script(script, *arguments)


@pytest.fixture
def page(server):
    with Page(f"http://127.0.0.1:{server.port}/") as page:
        yield page
        assert page.driver.get_log("browser") == [], "errors in the console"


@in_browser
def test_a_chat_in_the_page(page, server):
    assert page.one("#model").text == "fused-llama" or page.one("#model").text == "tales"
    page.until(lambda: page.one("#model").text == "tales")
    page.click("Settings")
    for name, value in ("temperature", "0"), ("max_tokens", "12"):
        page.one(f"[name={name}]").send_keys(value)
    page.click("Done")
    [asked] = FOX
    page.say(asked["content"])
    page.answered()
    said = server.chat()["message"]
    assert page.texts() == [asked["content"], said["content"].strip()]
    assert page.texts("footer")[1].endswith("tokens/s")
    page.one("#message").send_keys("One\ue008\ue007\ue000two")  # Shift+Enter
    assert page.one("#message").get_attribute("value") == "One\ntwo" and len(page.texts()) == 2
    page.one("#message").send_keys("\n")
    page.answered()
    assert page.texts()[2] == "One\ntwo" and len(page.texts()) == 4
    again = server.chat([asked, said, {"role": "user", "content": "One\ntwo"}])["message"]
    assert page.texts()[3] == again["content"].strip(), "the whole conversation is sent"
    # edit the first message: what follows it goes
    page.run("document.querySelectorAll('article.user button')[0].click()")
    page.one("article textarea").clear()
    page.one("article textarea").send_keys("And of a crow?")
    page.run("document.querySelector('article .said button').click()")
    page.answered()
    assert page.texts()[0] == "And of a crow?" and len(page.texts()) == 2
    before = page.texts()
    page.click("Retry")
    page.answered()
    assert page.texts() == before
    # several conversations, which stay
    page.click("New chat")
    page.say("Another")
    page.answered()
    page.driver.refresh()
    assert page.texts() == [] and len(page.all("#list div")) == 2
    page.all("#list div")[1].find_element("css selector", "button").click()
    assert page.texts() == before
    page.run("document.querySelectorAll('#list div')[1].lastChild.click()")
    assert page.texts() == [] and len(page.all("#list div")) == 1


@in_browser
def test_a_long_answer_is_stopped(page):
    page.run("settings.temperature = '0'; settings.max_tokens = '900'")
    escape = lambda: page.one("#message").send_keys("\ue00c")
    for stop in (lambda: page.click("Stop"), escape):
        page.click("New chat")
        page.say("Tell me a tale")
        page.until(lambda: len(page.texts()) == 2 and len(page.texts()[1]) > 20)
        assert page.all("#stop") and not page.all("#send"), "it is shown as it comes"
        stop()
        page.answered()
        part = page.texts()[1]
        time.sleep(0.3)
        assert page.texts()[1] == part and len(part) < 2000


ANSWER = """A *list* of **two** in `code`:

```python
<b>items</b>

</code><script>window.broken = 1</script>
```
<script>window.broken = 1</script> <img src=x onerror="window.broken = 1">

~~~
open"""


@in_browser
def test_what_a_model_writes_is_text(page):
    message = {"role": "assistant", "content": ANSWER}
    message["thought"] = "<img src=x onerror='window.broken = 1'>"
    page.run("chats = [chat = {title: '<b>x', messages: arguments[0]}]; render()", [message])
    code = "<b>items</b>\n\n</code><script>window.broken = 1</script>"
    assert page.texts("pre code") == [code, "open"]
    assert page.texts("p code") == ["code"] and page.texts("strong") == ["two"]
    assert page.texts("#list button")[0] == "<b>x"
    assert not page.all("img") and not page.all("b") and page.texts("summary") == ["Thought"]
    assert not page.all("details p"), "folded"
    page.one("summary").click()
    assert page.one("details p").text == message["thought"]
    assert page.run("return window.broken") is None
    assert page.run("return fetch('http://localhost:1/').catch((error) => error.message)")
    assert "Content Security Policy" in str(page.driver.get_log("browser"))


@in_browser
def test_the_page_on_a_phone(server):
    with Page(f"http://127.0.0.1:{server.port}/", phone=True) as page:
        assert page.run("return document.documentElement.scrollWidth") <= 390
        assert not page.all("nav")
        page.one("#menu").click()
        assert page.all("nav")
        page.click("New chat")
        assert not page.all("nav") and page.one("#send").rect["y"] < 800


@in_browser
def test_the_page_with_a_key():
    with Server("-m", TALES, "--api-key", "secret") as keyed:
        page = keyed.begin("/", method="GET").getresponse().read().decode()
        assert "secret" not in page and "<title>" in page
        with Page(f"http://127.0.0.1:{keyed.port}/") as page:
            page.until(lambda: page.all("[name=key]"))
            page.one("[name=key]").send_keys("secret")
            page.one("[name=max_tokens]").send_keys("5")
            page.click("Done")
            page.until(lambda: page.one("#model").text == "tales")
            page.say("Hello")
            page.answered()
            assert len(page.texts()) == 2 and page.texts()[1] and not page.all(".error")
            page.run("settings.key = 'wrong'")
            page.say("Hello")
            page.answered()
            assert page.texts(".error") == ["the API key is missing or wrong"]


def test_the_page_is_allowed_where_it_comes_from():
    allowed = AllowedOrigins(None, host="llama.lan", allow_origins=["https://chat.example.org"])
    for origin, host, is_own in (
        ("http://192.168.0.5:8080", "192.168.0.5:8080", True), ("http://[fe80::1]:8080", "[fe80::1]:8080", True),
        ("https://192.168.0.5", "192.168.0.5", True), ("http://llama.lan:80", "llama.lan:80", True),
        ("http://chat.example.org", "chat.example.org", True), ("http://evil.com", "evil.com", False),
        ("http://192.168.0.5:8080", "192.168.0.5", False), ("http://192.168.0.6", "192.168.0.5", False),
        ("null", "null", False), ("file://192.168.0.5", "192.168.0.5", False), ("http://", "", False),
        ("http://[", "[", False), ("http://192.168.0.5.evil.com", "192.168.0.5.evil.com", False),
    ):  # fmt: skip
        assert allowed.is_own_page(origin, host) == is_own, origin


def test_the_page_loads_nothing_else(server):
    answer = server.begin("/", method="GET").getresponse()
    html = answer.read().decode()
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "http://" not in html and "https://" not in html and " src=" not in html
    assert "innerHTML" not in html and "eval(" not in html and html.count("\n") <= 250
    assert json.loads(server.begin("/props", method="GET").getresponse().read())["total_slots"] >= 1
