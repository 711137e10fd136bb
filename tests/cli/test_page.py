"""`inspect --html`: the page is whole, self-contained and true, and hostile names stay text."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest

from moqext.__main__ import main
from moqext.checkpoint import Checkpoint
from moqext.cli.histogram import BARS, Histogram

from ..work import HANGS

GENUINE = [
    "checkpoints/llama_nvfp4_kvfp8",
    "exports/mixed_in_qkv",
    "exports/nemotron_h_mixed",
    "exports/gpt_oss_mxfp8",
    "exports/nvfp4_sharded",
    "exports/nvfp4_zero",
]
VOID = {"meta", "input", "br", "link"}


class Parsed(HTMLParser):
    """Checks that tags nest, and gathers elements and text."""

    def __init__(self, page):
        super().__init__()
        self.open, self.elements, self.text = [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] not in (["script"], ["style"]):
            self.text.append(data)


def page(directory, tmp_path, *options):
    file = tmp_path / "page.html"
    assert main(["inspect", str(directory), "--html", str(file), *options]) == 0
    return file.read_text(encoding="utf-8")


@pytest.mark.parametrize("case", GENUINE)
def test_it_is_whole_and_needs_nothing_else(case, data, tmp_path):
    parsed = Parsed(page(data / case, tmp_path))
    for tag, attributes in parsed.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed")
        assert not attributes.keys() & {"src", "href", "action", "onclick", "onload"}
    checkpoint = Checkpoint(data / case)
    text = " ".join(parsed.text)
    for name in [layer.name for layer in checkpoint.layers()] + [p.code for p in checkpoint.problems]:
        assert name in text
    assert "figure" in [tag for tag, _ in parsed.elements]


def test_histograms_count_every_scale(data, tmp_path):
    checkpoint = Checkpoint(data / "exports/mixed_in_qkv")
    parsed = Parsed(page(data / "exports/mixed_in_qkv", tmp_path))
    counted = sum(
        int(t.split()[0].replace(",", "")) for t in parsed.text if re.fullmatch(r"[\d,]+ values?", t)
    )
    stored = [info.numel for name, info in checkpoint.tensors.items() if "_scale" in name]
    assert counted == sum(stored)


def test_names_from_the_files_stay_text(copied, tmp_path):
    directory = copied("exports/fp8_kvcast")
    config = json.loads((directory / "config.json").read_text())
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m'\""
    config["architectures"] = [hostile]
    (directory / "config.json").write_text(json.dumps(config))
    parsed = Parsed(page(directory, tmp_path))
    assert [tag for tag, _ in parsed.elements].count("script") == 1
    assert "img" not in [tag for tag, _ in parsed.elements]
    assert hostile.replace("\x1b", "\\x1b") in "".join(parsed.text)


def test_memory_without_script(data, tmp_path):
    """Llama of one layer with 2 heads of 32 in FP8: 128 bytes a token."""
    parsed = Parsed(page(data / "checkpoints/llama_nvfp4_kvfp8", tmp_path))
    assert "128 B for each token in FP8" in " ".join(parsed.text)
    assert "8.19 kB" in parsed.text  # 64 tokens


def test_a_directory_without_weights_has_a_page(copied, tmp_path):
    directory = copied("exports/fp8_kvcast")
    (directory / "model.safetensors").unlink()
    assert "no_weights" in page(directory, tmp_path)


def test_a_page_that_cannot_be_written_is_status_2(data, tmp_path, capsys):
    file = tmp_path / "missing" / "page.html"
    assert main(["inspect", str(data / GENUINE[0]), "--html", str(file)]) == 2
    assert "page.html" in capsys.readouterr().err


def test_an_unreadable_checkpoint_leaves_no_page(tmp_path):
    """A file of no bytes was left."""
    file = tmp_path / "page.html"
    assert main(["inspect", str(tmp_path / "absent"), "--html", str(file)]) == 2
    assert list(tmp_path.iterdir()) == []
    file.write_text("an earlier page")
    assert main(["inspect", str(tmp_path / "absent"), "--html", str(file)]) == 2
    assert file.read_text() == "an earlier page"


def test_a_page_that_fails_half_way_leaves_the_earlier_one(data, tmp_path, monkeypatch):
    file = tmp_path / "page.html"
    file.write_text("an earlier page")
    monkeypatch.setattr("moqext.cli.inspect.page", lambda *_, **__: "\ud800")  # no text that can be encoded
    with pytest.raises(UnicodeEncodeError):
        main(["inspect", str(data / GENUINE[0]), "--html", str(file)])
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [
        ("page.html", "an earlier page")
    ]


def test_a_page_keeps_links_and_modes(data, tmp_path):
    real, link = tmp_path / "real.html", tmp_path / "page.html"
    real.touch(mode=0o600)
    link.symlink_to(real)
    assert main(["inspect", str(data / GENUINE[0]), "--html", str(link)]) == 0
    assert link.is_symlink()
    assert real.read_text().startswith("<!")
    assert real.stat().st_mode & 0o777 == 0o600


def test_histogram_of_all_sorts_of_values(rng):
    values = np.exp2(rng.uniform(-20, 3, 5000)).astype(np.float32)
    odd = np.array([0, -1, np.nan, np.inf], np.float32)
    histogram = Histogram()
    histogram.add(values[:2000])
    histogram.add(np.concatenate([values[2000:], odd]))
    assert (histogram.total, histogram.zeros, histogram.odd) == (5004, 1, 3)
    assert (histogram.low, histogram.high) == (values.min(), values.max())
    bars = histogram.bars()
    assert sum(bars) == 5000
    assert 0 < len(bars) <= BARS
    assert bars[0] > 0
    tiny = Histogram()
    tiny.add(np.array([1e-45, 3e38], np.float32))
    assert sum(tiny.bars()) == 2
    assert Histogram().bars() == []
    assert "0 values" in Histogram().svg()


@pytest.mark.unsanitized  # the sanitizers' libraries, preloaded, are none that a browser starts with
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_in_a_browser_the_script_runs(data, tmp_path):
    page(data / "checkpoints/llama_nvfp4_kvfp8", tmp_path)
    file = tmp_path / "page.html"
    check = "<script>document.querySelectorAll('th button')[5].click();</script></body>"
    file.write_text(file.read_text(encoding="utf-8").replace("</body>", check), encoding="utf-8")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", file.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=HANGS, check=True).stdout
    total = (
        sum(info.nbytes for info in Checkpoint(data / "checkpoints/llama_nvfp4_kvfp8").tensors.values())
        + 8192
    )
    assert f'<strong id="total">{total / 1000:.3g} kB</strong>' in shown
    sizes = [int(size) for size in re.findall(r'<td data-v="(\d+)">[\d.]+ kB</td>', shown)]
    assert len(sizes) == 7
    assert sizes == sorted(sizes, reverse=True)
    assert 'aria-sort="descending"' in shown
