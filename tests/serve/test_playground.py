"""The page to play with, as a person with a browser meets it."""

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

webdriver = pytest.importorskip("selenium.webdriver", reason="the page is tested in a browser, which selenium drives")
support = pytest.importorskip("selenium.webdriver.support.ui")
CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
if not (CHROMIUM.exists() and DRIVER.exists()):
    pytest.skip(f"the page is tested in a browser, which needs {CHROMIUM} and {DRIVER}", allow_module_level=True)

PATIENCE = 60  # seconds: the machine may be busy
FLAGS = """--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync"""
ANSWERS = """[...document.querySelectorAll("#answers section")].map((panel) => {
  const blocks = [...panel.querySelectorAll(".chunk")], of = (selector) => panel.querySelector(selector).textContent;
  return {title: of("h2"), prompt: of(".prompt"), tokens: +of("[data-of=tokens]"), steps: +of("[data-of=steps]"),
          texts: blocks.map((block) => block.textContent),
          colours: blocks.map((block) => getComputedStyle(block).backgroundColor)};
})"""


@contextmanager
def serving(*options: object) -> Iterator[str]:
    """The address of `calm serve bundled` with more options, which must end well at SIGTERM."""
    command = [sys.executable, "-m", "calm", "serve", "bundled", "--port", "0", *map(str, options)]
    wide = {**os.environ, "COLUMNS": "200"}  # the address should stand on one line
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=wide) as process:
        try:
            said = ""
            while not (found := re.search(r"Serving .* at (http://127\.0\.0\.1:\d+)", said)):
                said += (line := process.stderr.readline())
                assert line, said
            yield found[1]
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, said
        finally:
            process.kill()  # where it did not end


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    """A server of the bundled model and of a tiny Transformer with random weights."""
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
        driver.get_log("browser")  # what was said before is not of this page
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
        support.WebDriverWait(self.driver, PATIENCE, 0.05).until(lambda _: condition())

    def fill(self, tokens: int, **fields: str) -> None:
        for name, text in fields.items():
            self.one(name).clear()
            self.one(name).send_keys(text)
        self.run(f"(element('tokens').value = {tokens}, show())")  # a slider: keys would take a hundred presses

    def write(self, tokens: int, **fields: str) -> list[dict]:
        """Fill in, press Write, and give what each panel holds in the end."""
        self.fill(tokens, **fields)
        self.one("go").click()
        self.wait(lambda: "Writing" not in self.status)
        assert self.status.startswith("Done")
        return self.run(ANSWERS)

    def errors(self) -> list[dict]:
        return [line for line in self.driver.get_log("browser") if line["level"] == "SEVERE"]


@pytest.fixture
def page(chromium, url) -> Page:
    page = Page(chromium, url)
    page.wait(lambda: page.run("models.length"))
    return page


def test_blocks_are_the_steps_of_what_the_interface_answers(page, url):
    answers = page.write(32, prompt="And God said", seed="7")
    asked = {"prompt": "And God said", "seed": 7, "max_tokens": 32, "temperature": 0.5}
    for answer, model, chunk_size in zip(answers, ("bundled", "tiny"), (4, 1), strict=True):
        told = httpx.post(f"{url}/v1/completions", json={"model": model, **asked}, timeout=PATIENCE).json()
        assert "".join(answer["texts"]) == told["choices"][0]["text"] != ""
        assert answer["title"].startswith(model)
        assert answer["tokens"] == told["usage"]["completion_tokens"]
        assert answer["steps"] == len(answer["texts"]) == -(-answer["tokens"] // chunk_size)
        assert "rgba(0, 0, 0, 0)" not in answer["colours"]
        assert not any(a == b for a, b in zip(answer["colours"], answer["colours"][1:], strict=False))
    names = page.run("performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert {name.split("/v1/")[0] for name in names} == {url}  # no other host is asked for anything
    assert page.errors() == []


def test_keys_write_and_stop(page):
    page.fill(512, prompt="In the beginning", seed="1")
    page.one("prompt").send_keys(webdriver.Keys.CONTROL, webdriver.Keys.ENTER)
    page.wait(lambda: page.all(".chunk"))
    page.driver.switch_to.active_element.send_keys(webdriver.Keys.ESCAPE)
    page.wait(lambda: "Writing" not in page.status)
    assert page.status == "Stopped."
    assert sum(answer["tokens"] for answer in page.run(ANSWERS)) < 1024
    assert page.write(16, seed="1")[0]["steps"] == 4  # and it can begin anew


def test_tab_goes_through_the_controls_in_order(page):
    reached = []
    for _ in range(6):
        page.driver.switch_to.active_element.send_keys(webdriver.Keys.TAB)
        reached.append(page.run("document.activeElement.id || document.activeElement.tagName"))
    assert reached == ["A", "prompt", "temperature", "tokens", "seed", "go"]


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_narrow_screens_and_dark_ones(page, url, path):
    command = page.driver.execute_cdp_cmd
    command("Emulation.setDeviceMetricsOverride", {"width": 375, "height": 0, "deviceScaleFactor": 0, "mobile": False})
    page.driver.get(url + path)
    if path == "/":
        page.write(32, prompt="A" * 200, seed="2")
    page.wait(lambda: page.all("#answers .chunk, table"))
    assert page.run("document.documentElement.scrollWidth") <= page.run("innerWidth") == 375
    for scheme, sign in (("dark", 1), ("light", -1)):
        command("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
        colours = page.run("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
        ink, paper = (sum(map(int, re.findall(r"\d+", colour))) for colour in colours)
        assert sign * (ink - paper) > 300  # of 765: it can be read
    command("Emulation.clearDeviceMetricsOverride", {})
    command("Emulation.setEmulatedMedia", {"features": []})


def test_markup_is_shown_as_text(page):
    prompt = "<b>bold</b> &amp; <img src=x onerror=alert(1)>"
    assert [answer["prompt"] for answer in page.write(16, prompt=prompt, seed="3")] == [prompt, prompt]
    assert not page.all("#answers b, #answers img")


def test_a_server_with_keys_asks_for_one(chromium):
    with serving("--api-key", "secret") as address:
        page = Page(chromium, address)
        page.wait(lambda: page.one("key").is_displayed() and "asks for an API key" in page.status)
        page.one("key").send_keys("guess", webdriver.Keys.ENTER)
        page.wait(lambda: "does not know this API key" in page.status)
        assert page.write(16, key="secret", seed="1")[0]["steps"] == 4


def test_docs_list_the_paths(chromium, url):
    page = Page(chromium, f"{url}/docs")
    page.wait(lambda: page.all("h2"))
    assert {"POST /v1/completions", "GET /v1/models"} <= {heading.text for heading in page.all("h2")}
    assert f"curl {url}/v1/completions" in page.all("pre")[0].text
    assert page.errors() == []
