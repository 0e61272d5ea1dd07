"""Browser tests of the playground."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import calm

webdriver = pytest.importorskip("selenium.webdriver", reason="browser tests need selenium")
support = pytest.importorskip("selenium.webdriver.support.ui")
CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
if not (CHROMIUM.exists() and DRIVER.exists()):
    pytest.skip(f"browser tests need {CHROMIUM} and {DRIVER}", allow_module_level=True)

TIMEOUT = 60  # seconds: the machine may be busy
FLAGS = """--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync"""
READ_PANELS = """[...document.querySelectorAll("#panels section")].map((panel) => {
  const blocks = [...panel.querySelectorAll(".chunk")], of = (selector) => panel.querySelector(selector).textContent;
  return {title: of("h2"), prompt: of(".prompt"), tokens: +of("[data-stat=tokens]"), steps: +of("[data-stat=steps]"),
          texts: blocks.map((block) => block.textContent),
          colours: blocks.map((block) => getComputedStyle(block).backgroundColor)};
})"""


@contextmanager
def serving(*options: object) -> Iterator[str]:
    """Run `calm serve bundled` and yield its URL. It must exit with code 0 after SIGTERM."""
    command = [sys.executable, "-m", "calm", "serve", "bundled", "--port", "0", *map(str, options)]
    wide = {**os.environ, "COLUMNS": "200"}  # prints the URL on one line
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=wide) as process:
        try:
            log = ""
            while not (match := re.search(r"Serving .* at (http://127\.0\.0\.1:\d+)", log)):
                log += (line := process.stderr.readline())
                assert line, log
            yield match[1]
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=TIMEOUT)
            assert process.returncode == 0, log
        finally:
            process.kill()  # if still running


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    """URL of a server with the bundled model and a tiny Transformer with random weights."""
    directory = tmp_path_factory.mktemp("baseline") / "tiny"
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=4096, max_position_embeddings=1024, **shape)).save_pretrained(directory)
    for path in Path(calm.__file__).with_name("bundled").glob("tokenizer*.json"):
        (directory / path.name).write_bytes(path.read_bytes())
    with serving("--baseline", directory) as address:
        yield address


@pytest.fixture(scope="module")
def chromium(tmp_path_factory) -> Iterator:
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in [*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"]:
        options.add_argument(flag)
    driver = webdriver.Chrome(options, webdriver.ChromeService(str(DRIVER)))
    yield driver
    driver.quit()


class Page:
    def __init__(self, driver, address: str):
        self.driver = driver
        driver.get_log("browser")  # discards messages of earlier pages
        driver.get(address)

    def all(self, selector: str) -> list:
        return self.driver.find_elements("css selector", selector)

    def one(self, name: str):
        return self.driver.find_element("id", name)

    @property
    def status(self) -> str:
        return self.one("status").text

    def run(self, script: str):
        return self.driver.execute_script(f"return {script}")

    def wait(self, condition: Callable[[], object]) -> None:
        support.WebDriverWait(self.driver, TIMEOUT, 0.05).until(lambda _: condition())

    def fill(self, tokens: int, **fields: str) -> None:
        for name, text in fields.items():
            self.one(name).clear()
            self.one(name).send_keys(text)
        self.run(f"(element('tokens').value = {tokens}, updateLabels())")  # a slider: slow to set with keys

    def generate(self, tokens: int, **fields: str) -> list[dict]:
        """Fill in the form, click Generate, wait, and return the contents of each panel."""
        self.fill(tokens, **fields)
        self.one("generate").click()
        self.wait(lambda: "Generating" not in self.status)
        assert self.status.startswith("Done")
        return self.run(READ_PANELS)

    def errors(self) -> list[dict]:
        return [line for line in self.driver.get_log("browser") if line["level"] == "SEVERE"]


@pytest.fixture
def page(chromium, url) -> Page:
    page = Page(chromium, url)
    page.wait(lambda: page.run("models.length"))
    return page


def test_panels_match_the_api(page, url):
    panels = page.generate(32, prompt="And God said", seed="7")
    request = {"prompt": "And God said", "seed": 7, "max_tokens": 32, "temperature": 0.5}
    for panel, model, chunk_size in zip(panels, ("bundled", "tiny"), (4, 1), strict=True):
        completion = httpx.post(f"{url}/v1/completions", json={"model": model, **request}, timeout=TIMEOUT).json()
        assert "".join(panel["texts"]) == completion["choices"][0]["text"] != ""
        assert panel["title"].startswith(model)
        assert panel["tokens"] == completion["usage"]["completion_tokens"]
        assert panel["steps"] == len(panel["texts"]) == -(-panel["tokens"] // chunk_size)
        assert "rgba(0, 0, 0, 0)" not in panel["colours"]
        assert not any(a == b for a, b in zip(panel["colours"], panel["colours"][1:], strict=False))
    names = page.run("performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert {name.split("/v1/")[0] for name in names} == {url}  # no requests to other hosts
    assert page.errors() == []


def test_keyboard_shortcuts(page):
    page.fill(512, prompt="In the beginning", seed="1")
    page.one("prompt").send_keys(webdriver.Keys.CONTROL, webdriver.Keys.ENTER)
    page.wait(lambda: page.all(".chunk"))
    page.driver.switch_to.active_element.send_keys(webdriver.Keys.ESCAPE)
    page.wait(lambda: "Generating" not in page.status)
    assert page.status == "Stopped."
    assert sum(panel["tokens"] for panel in page.run(READ_PANELS)) < 1024
    assert page.generate(16, seed="1")[0]["steps"] == 4  # can start again


def test_tab_order(page):
    focused = []
    for _ in range(6):
        page.driver.switch_to.active_element.send_keys(webdriver.Keys.TAB)
        focused.append(page.run("document.activeElement.id || document.activeElement.tagName"))
    assert focused == ["A", "prompt", "temperature", "tokens", "seed", "generate"]


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_narrow_screen_and_color_schemes(page, url, path):
    command = page.driver.execute_cdp_cmd
    command("Emulation.setDeviceMetricsOverride", {"width": 375, "height": 0, "deviceScaleFactor": 0, "mobile": False})
    page.driver.get(url + path)
    if path == "/":
        page.generate(32, prompt="A" * 200, seed="2")
    page.wait(lambda: page.all("#panels .chunk, table"))
    assert page.run("document.documentElement.scrollWidth") <= page.run("innerWidth") == 375
    for scheme, sign in (("dark", 1), ("light", -1)):
        command("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
        colours = page.run("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
        foreground, background = (sum(map(int, re.findall(r"\d+", color))) for color in colours)
        assert sign * (foreground - background) > 300  # of 765: readable contrast
    command("Emulation.clearDeviceMetricsOverride", {})
    command("Emulation.setEmulatedMedia", {"features": []})


def test_markup_is_escaped(page):
    prompt = "<b>bold</b> &amp; <img src=x onerror=alert(1)>"
    assert [panel["prompt"] for panel in page.generate(16, prompt=prompt, seed="3")] == [prompt, prompt]
    assert not page.all("#panels b, #panels img")


def test_api_key_prompt(chromium):
    with serving("--api-key", "secret") as address:
        page = Page(chromium, address)
        page.wait(lambda: page.one("key").is_displayed() and "requires an API key" in page.status)
        page.one("key").send_keys("guess", webdriver.Keys.ENTER)
        page.wait(lambda: "Invalid API key" in page.status)
        assert page.generate(16, key="secret", seed="1")[0]["steps"] == 4


def test_docs_list_all_paths(chromium, url):
    page = Page(chromium, f"{url}/docs")
    page.wait(lambda: page.all("h2"))
    assert {"POST /v1/completions", "GET /v1/models"} <= {heading.text for heading in page.all("h2")}
    assert f"curl {url}/v1/completions" in page.all("pre")[0].text
    assert page.errors() == []
