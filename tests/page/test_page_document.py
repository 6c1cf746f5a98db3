"""The page itself: made from plain data, whatever is in it."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_runs import Page

from tightrope.page.content import (
    VERDICTS,
    Certificate,
    Contents,
    Epoch,
    Exhibit,
    Gallery,
    Sample,
    Skipped,
    Stage,
    Votes,
)
from tightrope.page.document import render
from tightrope.page.markup import page_file

SECTIONS = ("summary", "training", "certification", "tradeoff", "margins", "gallery", "settings")
EVIL = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>&amp;"


def full_run(name: str = "run", **changes: Any) -> Contents:
    sample = Sample(3, 1, 1, "falsified", "attack", -0.5, "counterexamples/000003.npy")
    proved = Sample(4, 2, 2, "verified", "ibp", 0.25)
    run = Contents(
        name=name,
        folder=f"runs/{name}",
        settings={"method": "taps", "net": "cnn3", "data": "mnist", "eps": "0.1", "epochs": "2"},
        history=tuple(
            Epoch(
                i, {"loss": 1.0 - i / 4, "natural": 0.9, "robust": 0.8, "radius": 0.1, "seconds": 2}
            )
            for i in range(2)
        ),
        annealing=(0, 1),
        certificate=Certificate(
            samples=10,
            verified=6,
            falsified=3,
            unknown=1,
            open=0,
            natural=0.8,
            adversarial=0.7,
            certified=0.6,
            seconds=12.5,
            eps="0.1",
            stages=(Stage("natural", 0, 2, 0.1), Stage("ibp", 6, 0, 0.2), Stage("attack", 0, 1, 2)),
            reasons={"time is up": 1},
        ),
        samples=(sample, proved),
        gallery=Gallery(
            (Exhibit(sample, "one", "one", "data:,a", "data:,b", "data:,c", "seven", 0.1),),
            (Exhibit(proved, "two", "two", "data:,d"),),
        ),
        commands=("tightrope train --out runs/run",),
        further={"PGD": "71 %"},
        notices=("something is missing",),
    )
    return dataclasses.replace(run, **changes)


def page_of(*runs: Contents, skipped: tuple[Skipped, ...] = ()) -> Page:
    return Page(render(runs, skipped, version="1.2.3", made="2026-01-02"))


def test_every_section_is_there_and_linked() -> None:
    page = page_of(full_run())
    assert [section["id"] for section in page.all("section")] == list(SECTIONS)
    links = [a["href"] for a in page.all("a")]
    assert links == ["#main", *(f"#{name}" for name in SECTIONS)]
    ids = [a["id"] for _, a in page.elements if a.get("id")]
    assert len(ids) == len(set(ids))
    for words in ("80.00 %", "70.00 %", "60.00 %", "12.5 s", "annealing", "1 samples stayed"):
        assert words in page.text, words
    for words in ("one → seven", "± 0.1", "something is missing", "time is up", "PGD", "1.2.3"):
        assert words in page.text, words


def test_the_page_asks_for_nothing() -> None:
    page = page_of(full_run(), full_run("other"))
    for tag, attributes in page.elements:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, value)
        assert tag not in ("link", "iframe", "object", "embed", "base", "form")
        # The policy forbids these, so they would be dead letters.
        assert not any(name == "style" or name.startswith("on") for name in attributes), tag


def test_the_policy_allows_our_script_and_style_and_nothing_else() -> None:
    html = render([full_run()], [], version="1", made="today")
    page = Page(html)
    policy = page.all("meta", **{"http-equiv": "Content-Security-Policy"})[0]["content"]
    assert policy is not None and policy.startswith("default-src 'none'; img-src data:; ")
    assert "unsafe" not in policy
    for name, pattern in (
        ("script", r"<script>(.*?)</script>"),
        ("style", r"<style>(.*?)</style>"),
    ):
        [text] = re.findall(pattern, html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy
    assert html.index("Content-Security-Policy") < html.index("<style>")


def _evil(value: Any) -> Any:
    """Put markup into every text of a run."""
    if isinstance(value, str) and value not in VERDICTS:
        return EVIL
    if isinstance(value, tuple):
        return tuple(_evil(part) for part in value)
    if isinstance(value, dict):
        return {k: _evil(v) for k, v in value.items()} | {EVIL: EVIL}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _evil(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


def test_text_from_files_is_shown_as_text() -> None:
    plain, run = page_of(full_run(), full_run()), full_run()
    evil = dataclasses.replace(
        *(run,),
        name=EVIL,
        folder=EVIL,
        settings=_evil(dict(run.settings)),
        certificate=dataclasses.replace(
            run.certificate or pytest.fail("no certificate"),
            eps=EVIL,
            stages=(Stage(EVIL, 1, 2, 3),),
            reasons={EVIL: 1},
        ),
        samples=_evil(run.samples),
        gallery=Gallery(_evil(run.gallery.falsified), _evil(run.gallery.hardest), EVIL),
        commands=(EVIL,),
        further={EVIL: EVIL},
        notices=(EVIL,),
    )
    page = page_of(evil, evil, skipped=(Skipped(EVIL, EVIL),))
    assert page.text.count(EVIL) > 20
    kinds = [{tag for tag, _ in p.elements} for p in (plain, page)]
    assert kinds[1] <= kinds[0]
    for _, attributes in page.elements:
        assert not any(name.startswith("on") for name in attributes)
    assert [s for s in page.scripts if "alert" in s] == []


def test_several_runs_get_a_table_that_can_be_sorted() -> None:
    certificate = full_run().certificate
    assert certificate is not None
    better = dataclasses.replace(certificate, certified=0.65)
    page = page_of(
        full_run("a"), full_run("b", certificate=better), full_run("c", certificate=None)
    )
    headers = [a["aria-sort"] for a in page.all("th", scope="col") if "aria-sort" in a]
    # One for those that are certified, one for the other.
    assert headers == 2 * (["ascending"] + ["none"] * 11)
    assert len(page.all("button", type="button")) >= 24
    assert "what is proved" in page.text and "nothing is guaranteed of these" in page.text
    assert "b, the highest certified accuracy" in page.text
    assert "compare with care" not in page.text


def test_votes_under_noise_never_stand_beside_proofs() -> None:
    votes = Votes(200, 0.875, 0.0625, 0.25, 1000, 0.001, {"0.25": 0.75, "0.5": 0.5625})
    noisy = full_run("noisy", certificate=None, votes=votes)
    page = render((full_run("proved"), noisy), (), version="1", made="2026-01-02")
    tables = [t.split("</table>")[0] for t in page.split("<table")[1:]]
    with_votes = [t for t in tables if "smoothing" in t]
    (table,) = with_votes
    for words in ("noisy", "87.50 %", "6.25 %", "75.00 %", "56.25 %", "0.001", "200"):
        assert words.replace(" %", "\u202f%") in table, words
    assert "proved<" not in table
    sortable = [t for t in tables if "sortable" in t]
    assert len(sortable) == 1 and "noisy" not in sortable[0] and "proved" in sortable[0]
    assert "smoothing" not in page_of(full_run("proved")).text


def test_runs_that_do_not_compare_are_not_ranked() -> None:
    certificate = full_run().certificate
    assert certificate is not None
    other = dataclasses.replace(certificate, certified=0.65, samples=5, eps="0.3")
    page = page_of(full_run("a"), full_run("b", certificate=other))
    assert "a, the first run that is certified" in page.text
    assert "compare with care" in page.text


def test_a_run_with_nothing_but_a_name() -> None:
    page = page_of(Contents("bare", "runs/bare"))
    assert [section["id"] for section in page.all("section")] == list(SECTIONS)
    assert "No epoch has been trained yet." in page.text
    assert page.text.count("Nothing is certified yet") == 4


@pytest.mark.parametrize("part", ["history", "certificate", "samples", "gallery", "settings"])
def test_any_part_may_be_missing(part: str) -> None:
    default = {f.name: f for f in dataclasses.fields(Contents)}[part]
    nothing = (
        default.default_factory()
        if default.default_factory is not dataclasses.MISSING
        else default.default
    )
    page = page_of(full_run(**{part: nothing}), full_run("b"))
    assert len(page.all("section")) == len(SECTIONS)


def contrast(a: str, b: str) -> float:
    """Return the contrast of two colours as WCAG 2 defines it."""

    def luminance(color: str) -> float:
        digits = color if len(color) == 6 else "".join(2 * c for c in color)
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_text_can_be_read_in_every_theme() -> None:
    blocks = re.findall(r"\{([^{}]*--page:[^{}]*)\}", page_file("style.css"))
    assert len(blocks) == 4  # light, dark by the system, dark by the button, paper
    for block in blocks:
        colors = dict(re.findall(r"--([a-z-]+): #([0-9a-f]{3,6})", block))
        for ground in ("page", "panel"):
            for name in ("ink", "soft", "accent", "verified", "falsified", "unknown"):
                assert contrast(colors[name], colors[ground]) >= 4.5, (name, ground, colors)
        assert contrast(colors["ink"], colors["notice"]) >= 7
        assert contrast(colors["soft"], colors["phase"]) >= 4.5
    assert blocks[1].split() == blocks[2].split()


numbers = st.floats(-1e29, 1e29) | st.floats(0, 1) | st.just(0.0)
texts = st.text(max_size=12)
epochs = st.lists(
    st.dictionaries(
        st.sampled_from(
            ["loss", "natural", "robust", "radius", "validation_natural", "validation_robust"]
        ),
        numbers,
    ),
    max_size=6,
).map(lambda lines: tuple(Epoch(i, values) for i, values in enumerate(lines)))
samples = st.lists(
    st.builds(
        Sample,
        index=st.integers(),
        label=st.integers(),
        prediction=st.integers(),
        verdict=st.sampled_from(VERDICTS),
        stage=texts,
        margin=st.none() | numbers,
    ),
    max_size=20,
).map(tuple)
counts = st.integers(0, 10**6)
shares = st.floats(0, 1)
certificates = st.builds(
    Certificate,
    samples=counts,
    verified=counts,
    falsified=counts,
    unknown=counts,
    open=counts,
    natural=shares,
    adversarial=st.none() | shares,
    certified=shares,
    seconds=st.floats(0, 1e29),
    eps=st.none() | texts,
    stages=st.lists(st.builds(Stage, texts, counts, counts, st.floats(0, 1e29)), max_size=4).map(
        tuple
    ),
    reasons=st.dictionaries(texts, counts, max_size=2),
)
runs = st.builds(
    Contents,
    name=texts,
    folder=texts,
    settings=st.dictionaries(
        texts | st.sampled_from(["method", "eps", "epochs"]), texts, max_size=4
    ),
    history=epochs,
    annealing=st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9)),
    certificate=st.none() | certificates,
    samples=samples,
    commands=st.lists(texts, max_size=2).map(tuple),
    notices=st.lists(texts, max_size=2).map(tuple),
)


@settings(max_examples=60)
@given(st.lists(runs, min_size=1, max_size=3))
def test_any_content_makes_a_page(content: list[Contents]) -> None:
    html = render(content, [], version="1", made="today")
    page = Page(html)
    assert len(page.all("section")) == len(SECTIONS)
    html.encode("utf-8")
    for _, attributes in page.elements:
        for name in ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width", "height", "d"):
            value = attributes.get(name) or ""
            assert "nan" not in value and "inf" not in value, attributes
            if name in ("width", "height"):
                assert not value.startswith("-"), attributes
    for text in page.scripts[:-1]:
        json.loads(text)
