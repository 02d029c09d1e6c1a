"""The quizzes: every chapter's file, and the interactive that asks their questions."""

import json
import math
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from widget_support import THEMES, WCAG, comparing_colours, open_widgets

from cbref import strings
from cbref.widgets import Quiz
from cbref.widgets.quiz import load_quiz
from cbref.widgets.static import source

FOLDER = Path(strings.__file__).parent / "en"
CHAPTERS = sorted(file.stem.removeprefix("quiz_") for file in FOLDER.glob("quiz_*.json"))

SAMPLE = [
    {
        "id": "sample-idle",
        "kind": "choice",
        "ask": "Why is a slot idle in static batching, where `free > 0`?",
        "options": [
            {"text": "The GPU has no memory left", "right": False, "why": "Memory is not what it waits for."},
            {
                "text": "The batch is held until its longest request is done",
                "right": True,
                "why": "Nobody joins before `batch.done`.",
            },
            {"text": "The queue is <empty>", "right": False, "why": "Others wait & could run."},
        ],
    },
    {
        "id": "sample-bytes",
        "kind": "number",
        "ask": "How many bytes is one block?",
        "answer": 12000,
        "tolerance": 100,
        "unit": "bytes",
        "right": "Sixteen tokens of 750 bytes.",
        "near": [{"value": 6000, "why": "You forgot the values."}],
        "wrong": "Keys and values, for each token of `block_size`.",
    },
    {
        "id": "sample-share",
        "kind": "number",
        "ask": "Which share is wasted?",
        "answer": 0.5,
        "right": "6 of 12.",
        "wrong": "Count.",
    },
]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """write(content, chapter, language) makes a quiz of it that `Quiz` finds."""
    root = tmp_path / "strings"
    (root / "en").mkdir(parents=True)
    (root / "en" / "quiz.json").write_text((FOLDER / "quiz.json").read_text())
    monkeypatch.setattr(strings, "_ROOT", root)
    monkeypatch.delenv("CBREF_LANG", raising=False)

    def write(content, chapter="sample", language="en"):
        (root / language).mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        (root / language / f"quiz_{chapter}.json").write_text(text)
        return chapter

    return write


@pytest.fixture
def sample(write):
    return write({"questions": SAMPLE})


# ---- The chapters' own files


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_quiz_of_a_chapter_is_complete(chapter):
    questions = load_quiz(chapter, "en")  # ids, the one right answer, a reason for each wrong one, and the like
    assert len(questions) >= 3
    assert any(question["kind"] == "number" for question in questions)
    for question in questions:
        if question["kind"] == "choice":
            assert 3 <= len(question["options"]) <= 4, question["id"]


def test_ids_are_unique_in_the_book():
    ids = [question["id"] for chapter in CHAPTERS for question in load_quiz(chapter, "en")]
    assert sorted(ids) == sorted(set(ids))


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_numbers_are_what_the_engine_says(chapter):
    checks = import_module(f"quiz_checks.{chapter}")
    for question in load_quiz(chapter, "en"):
        if question["kind"] != "number":
            continue
        name = question["id"].replace("-", "_")
        assert hasattr(checks, name), f"tests/quiz_checks/{chapter}.py has no function {name}"
        value = float(getattr(checks, name)())
        assert value == pytest.approx(question["answer"], rel=1e-9, abs=max(question["tolerance"], 1e-9)), name
        for near in question["near"]:
            assert abs(near["value"] - value) > question["tolerance"], f"{name}: {near['value']} is right, not near"


# ---- What a file must be


def test_fields_that_may_be_left_out(sample):
    share = load_quiz(sample)[2]
    assert (share["tolerance"], share["unit"], share["near"]) == (0, "", [])


def test_unknown_chapter_and_language(sample, write):
    write({"questions": SAMPLE}, "another")
    with pytest.raises(ValueError, match=r"no quiz for chapter 'nothing'; there are: another, sample$"):
        Quiz("nothing")
    with pytest.raises(ValueError, match="no texts in language 'xx'; there are: en"):
        Quiz("sample", language="xx")


CHOICE, NUMBER = 0, 1
OPTIONS = SAMPLE[0]["options"]
MALFORMED = [
    (CHOICE, {"kind": "essay"}, "'sample-idle': field 'kind' must be 'choice' or 'number', got 'essay'"),
    (CHOICE, {"kind": None}, "field 'kind' must be"),
    (CHOICE, {"id": "Sample Idle"}, "'Sample Idle': field 'id' must be small letters"),
    (CHOICE, {"id": 3}, "question 3: field 'id' must be"),
    (CHOICE, {"id": "sample-bytes"}, "'sample-bytes': field 'id' is that of another question"),
    (CHOICE, {"ask": " "}, "field 'ask' must be a text, got ' '"),
    (CHOICE, {"ask": "What is `this?"}, "field 'ask' must be a text whose backticks come in pairs"),
    (CHOICE, {"ask": ...}, "'sample-idle': field 'ask' is missing"),
    (CHOICE, {"id": ...}, "question 1: field 'id' is missing"),
    (CHOICE, {"hint": 1}, "field 'hint' is not known"),
    (CHOICE, {"answer": 1}, "field 'answer' is not known"),
    (CHOICE, {"options": OPTIONS[:1]}, "field 'options' must be a list of two or more"),
    (CHOICE, {"options": [OPTIONS[0], OPTIONS[2]]}, "field 'options' must be exactly one that is right, got []"),
    (CHOICE, {"options": [*OPTIONS, OPTIONS[1] | {"text": "x"}]}, "field 'options' must be exactly one that is right"),
    (CHOICE, {"options": [*OPTIONS, OPTIONS[2]]}, "field 'options' must be all different"),
    (CHOICE, {"options": [{"text": "x", "right": False}, OPTIONS[1]]}, r"field 'options[0].why' is missing"),
    (CHOICE, {"options": [OPTIONS[1], OPTIONS[0] | {"why": ""}]}, "field 'options[1].why' must be a text"),
    (CHOICE, {"options": [OPTIONS[1], OPTIONS[0] | {"right": 0}]}, "field 'options[1].right' must be true or false"),
    (CHOICE, {"options": [OPTIONS[1], "x"]}, "field 'options[1]' must be an object, got 'x'"),
    (NUMBER, {"answer": "12"}, "'sample-bytes': field 'answer' must be a number, got '12'"),
    (NUMBER, {"answer": True}, "field 'answer' must be a number"),
    (NUMBER, {"answer": math.inf}, "field 'answer' must be a number"),
    (NUMBER, {"tolerance": -1}, "field 'tolerance' must be 0 or more"),
    (NUMBER, {"unit": 3}, "field 'unit' must be a text"),
    (NUMBER, {"wrong": ...}, "field 'wrong' is missing"),
    (NUMBER, {"near": {}}, "field 'near' must be a list"),
    (NUMBER, {"near": [{"value": 5}]}, "field 'near[0].why' is missing"),
    (NUMBER, {"near": [{"value": 12100, "why": "x"}]}, "field 'near[0].value' must be outside of the tolerance"),
]


@pytest.mark.parametrize(("which", "change", "message"), MALFORMED, ids=[case[2] for case in MALFORMED])
def test_malformed_question_is_named(write, which, change, message):
    questions = [dict(question) for question in SAMPLE]
    for field, value in change.items():
        questions[which].pop(field, None)
        if value is not ...:
            questions[which][field] = value
    with pytest.raises(ValueError, match=re.escape(message)):
        Quiz(write({"questions": questions}))


@pytest.mark.parametrize("content", ["[]", "{", '{"questions": []}', '{"questions": {}}', '{"questions": [], "x": 1}'])
def test_malformed_file_is_named(write, content):
    with pytest.raises(ValueError, match=r"quiz_sample\.json"):
        Quiz(write(content))


def test_something_else_than_a_question(write):
    with pytest.raises(ValueError, match=r"question 1: field 'question' must be an object, got 'x'"):
        Quiz(write({"questions": ["x"]}))


def test_translation(write):
    write({"questions": SAMPLE})
    korean = SAMPLE[1] | {"ask": "블록 하나는 몇 바이트인가?", "unit": "바이트"}
    write({"questions": [korean]}, language="ko")
    asked = [question["ask"] for question in load_quiz("sample", "ko")]
    assert asked == [SAMPLE[0]["ask"], korean["ask"], SAMPLE[2]["ask"]]
    write({"questions": [korean | {"answer": 13000}]}, language="ko")
    with pytest.raises(ValueError, match=r"'sample-bytes': field 'answer' of the translation is another answer"):
        load_quiz("sample", "ko")


# ---- The page without a kernel


def show(page, tmp_path, *widgets, **options):
    open_widgets(page, tmp_path, *widgets, **options)
    return [Screen(page, number) for number in range(len(widgets))]


class Screen:
    """One quiz as a reader has it before him."""

    def __init__(self, page, number):
        self.root = page.locator(".cbq:not(.cbq-picture)").nth(number)

    def question(self, name):
        return self.root.locator(f"[data-question='{name}']")

    def check(self, name):
        self.question(name).get_by_role("button").click()
        return self.heard(name)

    def heard(self, name):
        return self.question(name).get_by_role("status").inner_text()

    def choose(self, name, text):
        self.question(name).get_by_label(text).check()
        return self.check(name)

    def type(self, name, text):
        self.question(name).get_by_role("textbox").fill(text)
        return self.check(name)

    @property
    def score(self):
        return self.root.locator(".cbq-score").inner_text()


def test_choice(page, tmp_path, sample):
    (screen,) = show(page, tmp_path, Quiz(sample))
    assert page.locator(".cbref-picture").count() == 0
    text = page.locator("main").inner_text()
    assert not any(option["why"].replace("`", "") in text for option in OPTIONS)
    labels = screen.question("sample-idle").locator("label").all_inner_texts()
    assert labels == [option["text"] for option in OPTIONS], "in the order of the file"

    assert screen.heard("sample-idle") == ""
    assert screen.check("sample-idle") == "Choose an answer first."
    assert screen.choose("sample-idle", "no memory") == "Not right yet. Memory is not what it waits for."
    chosen = screen.question("sample-idle").locator("label[data-verdict=wrong]")
    assert chosen.all_inner_texts() == [OPTIONS[0]["text"]]
    screen.question("sample-idle").get_by_label("<empty>").check()
    assert screen.heard("sample-idle") == "", "what was said is about another answer"
    assert screen.question("sample-idle").locator("[data-verdict]").count() == 0
    assert screen.check("sample-idle") == "Not right yet. Others wait & could run."
    assert screen.choose("sample-idle", "held until") == "Well done, that is right. Nobody joins before batch.done."
    assert screen.question("sample-idle").locator("code").all_inner_texts() == ["free > 0", "batch.done"]
    assert screen.score == "", "two questions are still open"


def test_number(page, tmp_path, sample):
    (screen,) = show(page, tmp_path, Quiz(sample))
    assert "bytes" in screen.question("sample-bytes").inner_text()
    assert screen.check("sample-bytes") == "Type a number first."
    field = screen.question("sample-bytes").get_by_role("textbox")
    assert screen.type("sample-bytes", "many").startswith("This cannot be read as a number.")
    assert field.get_attribute("aria-invalid") == "true"
    hint = "Keys and values, for each token of block_size."
    assert screen.type("sample-bytes", "1,500") == f"Not right yet: 1,500 bytes. {hint}"
    assert field.get_attribute("aria-invalid") == "false"
    assert screen.type("sample-bytes", "6050") == "Not right yet: 6,050 bytes. You forgot the values."
    for text in ("12000", "12,000", "12 000", "12\u202f000", "12_000 bytes", "11900", "12100.0", " 1.2e4 "):
        field.fill("")
        assert screen.heard("sample-bytes") == ""
        assert screen.type("sample-bytes", text) == "Well done, that is right. Sixteen tokens of 750 bytes.", text
    assert screen.type("sample-bytes", "12100.1").startswith("Not right yet: 12,100.1 bytes.")
    for text in ("0.5", ".5", "0,5", "50 %", "50%", "5e-1"):
        assert screen.type("sample-share", text) == "Well done, that is right. 6 of 12.", text
    assert screen.type("sample-share", "50") == "Not right yet: 50. Count."


NOTATIONS = [
    ("1,000", "", 1000),
    ("1 000", "", 1000),
    ("1\u00a0000\u202f000", "", None),  # two kinds of space come out as one
    ("1'000.5", "", 1000.5),
    ("1 000,5", "", 1000.5),
    ("1,234,567.8", "", 1234567.8),
    ("1,0", "", 1),
    ("0,500", "", 0.5),
    ("3.", "", 3),
    ("−3", "", -3),
    ("+3", "", 3),
    ("≈ 12 blocks", "blocks", 12),
    ("12 Blocks", "blocks", 12),
    ("12 tokens", "blocks", "NaN"),
    ("50 %", "%", 50),
    ("50%", "% of the slots", 50),
    ("50", "%", 50),
    ("50 %", "", 0.5),
    ("７．５", "", 7.5),
    ("1.5x", "×", 1.5),
    ("3 ms", "`ms`", 3),
    ("1,234,5", "", "NaN"),
    ("1.000.000", "", "NaN"),
    ("1/2", "", "NaN"),
    ("", "", "NaN"),
    ("%", "", "NaN"),
    ("Infinity", "", "NaN"),
    ("0x10", "", "NaN"),
    ("--1", "", "NaN"),
]


def test_notations_of_numbers(page, tmp_path):
    file = tmp_path / "parse.html"
    file.write_text(f"<meta charset=utf-8><script type=module>{Quiz._esm}\nwindow.parse = parse;</script>")
    page.goto(file.as_uri())
    read = "cases => cases.map(([text, unit, decimal]) => String(parse(text, unit, decimal)))"
    answers = page.evaluate(read, [[text, unit, "."] for text, unit, _ in NOTATIONS])
    for (text, unit, value), answer in zip(NOTATIONS, answers, strict=True):
        value = 1_000_000 if value is None else value
        assert answer == (value if value == "NaN" else f"{value:.15g}"), (text, unit)
    german = [["1.000", "", ","], ["1,000", "", ","], ["1.000,5", "", ","], ["0.5", "", ","]]
    assert page.evaluate(read, german) == ["1000", "1", "1000.5", "0.5"]


def test_score_and_another_try(page, tmp_path, sample):
    (screen,) = show(page, tmp_path, Quiz(sample))
    screen.choose("sample-idle", "no memory")
    screen.type("sample-bytes", "12000")
    assert screen.score == ""
    screen.type("sample-share", "nothing")
    assert screen.score == "", "not an answer yet"
    screen.type("sample-share", "0.5")
    assert screen.score.startswith("2 of 3 questions are right.")
    screen.choose("sample-idle", "held until")
    assert screen.score == "All 3 questions are right."
    screen.type("sample-share", "nothing")
    assert screen.score == "All 3 questions are right.", "what cannot be read takes nothing away"
    screen.choose("sample-idle", "<empty>")
    assert screen.score.startswith("2 of 3 questions are right.")
    page.reload()
    assert screen.score == "" and page.locator(":checked").count() == 0, "nothing is stored"
    assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]


def test_keyboard_alone(page, tmp_path, sample):
    (screen,) = show(page, tmp_path, Quiz(sample))

    def tab(times=1):
        for _ in range(times):
            page.keyboard.press("Tab")
        return page.evaluate(
            "document.activeElement.matches(':focus-visible') && document.activeElement.type"
            " + ' ' + document.activeElement.closest('[data-question]').dataset.question"
        )

    assert tab() == "radio sample-idle"
    outline = "node => getComputedStyle(node).outlineStyle"
    assert screen.question("sample-idle").locator("label").first.evaluate(outline) == "solid"
    page.keyboard.press("Space")
    page.keyboard.press("Enter")
    assert screen.heard("sample-idle") == "Not right yet. Memory is not what it waits for."
    page.keyboard.press("ArrowDown")
    assert screen.heard("sample-idle") == ""
    assert tab() == "button sample-idle"
    page.keyboard.press("Enter")
    assert screen.heard("sample-idle").startswith("Well done")
    assert page.evaluate("document.activeElement.type") == "button", "the keyboard keeps its place"
    assert tab() == "text sample-bytes"
    page.keyboard.type("12,000")
    page.keyboard.press("Enter")
    assert screen.heard("sample-bytes").startswith("Well done")
    assert tab(2) == "text sample-share"
    page.keyboard.type("50 %")
    assert tab() == "button sample-share"
    page.keyboard.press("Space")
    assert screen.score == "All 3 questions are right."


def test_what_a_screen_reader_gets(page, tmp_path, sample):
    (screen,) = show(page, tmp_path, Quiz(sample))
    assert page.get_by_role("group", name="Check yourself", exact=True).count() == 1
    group = page.get_by_role("group", name="Question 1 of 3 Why is a slot idle in static batching, where free > 0?")
    assert group.get_by_role("radio").count() == 3
    field = page.get_by_role("textbox", name="Question 2 of 3 How many bytes is one block?")
    assert field.get_attribute("inputmode") == "decimal"
    screen.type("sample-bytes", "6000")
    ids = field.get_attribute("aria-describedby").split()
    said = [page.locator(f"#{name}").inner_text() for name in ids]
    assert said == ["bytes", "Not right yet: 6,000 bytes. You forgot the values."]
    assert page.get_by_role("button").evaluate_all("all => all.map(node => node.ariaLabel)") == [
        "Check question 1",
        "Check question 2",
        "Check question 3",
    ]
    assert screen.root.locator("[aria-live=polite]").count() == 4


@pytest.mark.parametrize("theme", THEMES)
def test_contrast_and_axe(page, tmp_path, sample, theme):
    html, expected = THEMES[theme]
    page.emulate_media(color_scheme="dark" if "system" in theme else "light")
    (screen,) = show(page, tmp_path, Quiz(sample), html=html)
    if theme in ("light", "book"):
        page.set_viewport_size({"width": 360, "height": 700})
    screen.choose("sample-idle", "no memory")
    screen.type("sample-bytes", "12000")
    screen.type("sample-share", "what?")
    found = screen.root.evaluate(
        comparing_colours("""
            const panel = getComputedStyle(root.querySelector(".cbq-question")).backgroundColor;
            const graphics = [...root.querySelectorAll(".cbq-option, .cbq-input")].map(node => getComputedStyle(node))
                .map(style => ["border", contrast(style.borderTopColor, panel)]);
            const icons = [...root.querySelectorAll(".cbq-icon")].map(node => getComputedStyle(node))
                .map(style => ["icon", contrast(style.backgroundColor, panel)]);
            return { dark: luminance(getComputedStyle(root).backgroundColor) < 0.1, pairs: [...graphics, ...icons] };
        """)
    )
    assert found["dark"] == (expected == "dark")
    assert len(found["pairs"]) == 5 + 3
    assert [pair for pair in found["pairs"] if pair[1] < 3] == []
    result = Axe().run(page, options=WCAG)
    assert result.violations_count == 0, result.generate_report()


def test_verdicts_differ_by_more_than_colour(page, tmp_path, sample):
    (screen,) = show(page, tmp_path, Quiz(sample))
    looks = []
    for answer in ("no memory", "held until"):
        screen.choose("sample-idle", answer)
        icon = screen.question("sample-idle").locator(".cbq-icon").evaluate("node => getComputedStyle(node).clipPath")
        option = screen.question("sample-idle").locator("label[data-verdict]")
        looks.append(
            (
                icon,
                *option.evaluate("""node => [getComputedStyle(node).borderTopStyle,
            getComputedStyle(node, "::after").clipPath]"""),
            )
        )
    assert all(one != other for one, other in zip(*looks, strict=True)), looks


@pytest.mark.parametrize("width", [320, 360, 1280])
def test_fits_the_window(page, tmp_path, write, width):
    long = SAMPLE[0] | {"ask": "Why `" + "a" * 90 + "`?"}
    page.set_viewport_size({"width": width, "height": 700})
    (screen,) = show(page, tmp_path, Quiz(write({"questions": [long, *SAMPLE[1:]]})))
    screen.choose("sample-idle", "no memory")
    screen.type("sample-bytes", "9" * 30)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    small = screen.root.evaluate(
        """root => [...root.querySelectorAll("button, input:not([type=radio]), .cbq-option")]
            .map(node => node.getBoundingClientRect()).filter(box => box.width < 24 || box.height < 24).length"""
    )
    assert small == 0


def test_two_on_one_page(page, tmp_path, sample):
    first, second = show(page, tmp_path, Quiz(sample), Quiz(sample))
    first.choose("sample-idle", "held until")
    second.choose("sample-idle", "no memory")
    second.type("sample-bytes", "12000")
    assert first.question("sample-idle").locator(":checked").count() == 1
    assert first.heard("sample-idle").startswith("Well done")
    assert first.heard("sample-bytes") == ""
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(node => node.id)")
    assert len(ids) == len(set(ids)) > 0


def test_text_cannot_break_out_of_its_script(page, tmp_path, write):
    odd = "</script><!--<script>'\"&{number}<b>x</b>"
    (screen,) = show(page, tmp_path, Quiz(write({"questions": [SAMPLE[0] | {"ask": odd}, *SAMPLE[1:]]})))
    assert screen.root.locator(".cbq-ask").first.inner_text() == odd
    assert screen.choose("sample-idle", "held until").startswith("Well done")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_without_scripts_the_picture_stands(browser, tmp_path, sample, theme):
    context = browser.new_context(java_script_enabled=False, viewport={"width": 360, "height": 700})
    page = context.new_page()
    try:
        show(page, tmp_path, Quiz(sample), html=f'data-theme="{theme}"')
        picture = page.locator(".cbref-picture")
        assert picture.locator("button, input").count() == 0, "no dead controls"
        asked = picture.locator(".cbq > ol > li").all()
        assert asked[0].locator("ul li").all_inner_texts() == [option["text"] for option in OPTIONS]
        assert asked[0].locator("code").inner_text() == "free > 0"
        assert asked[1].inner_text().split("\n\n")[-1] == "The answer is a number. Unit: bytes."
        answers = picture.locator("details li strong")
        assert not any(answers.nth(i).is_visible() for i in range(answers.count()))
        assert answers.count() == 3 + 2 + 1
        picture.locator("summary").click()
        assert answers.first.is_visible()
        solved = [item.inner_text() for item in picture.locator("details > ol > li").all()]
        assert solved[0].startswith(f"Right: {OPTIONS[1]['text']}\nNobody joins before batch.done.")
        assert "Not right: The queue is <empty>\nOthers wait & could run." in solved[0]
        assert solved[1].startswith("Right: 12,000 bytes\nSixteen tokens of 750 bytes.")
        assert "Not right: 6,000 bytes\nYou forgot the values." in solved[1]
        assert solved[2] == "Right: 0.5\n6 of 12."
        assert page.locator("main").evaluate("node => node.scrollWidth") <= 360
        assert picture.locator("summary").bounding_box()["height"] >= 24
    finally:
        context.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_picture_is_accessible(page, tmp_path, sample, theme):
    file = tmp_path / "picture.html"
    widget = Quiz(sample)
    head = f'<meta charset="utf-8"><title>Test</title><style>{widget._css}</style>'
    file.write_text(f'<html lang="en" data-theme="{theme}"><head>{head}</head><main>{widget.picture()}</main>')
    page.goto(file.as_uri())
    page.locator("summary").click()
    result = Axe().run(page, options=WCAG)
    assert result.violations_count == 0, result.generate_report()


# ---- The Python side


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_bundle_is_the_same_on_every_run(chapter):
    bundle = Quiz(chapter)._repr_mimebundle_()[0]
    assert set(bundle) == {"text/plain", "text/html", "application/vnd.jupyter.widget-view+json"}
    assert bundle["text/plain"] == f"Quiz with {len(load_quiz(chapter))} questions"
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] not in bundle["text/html"]
    assert len(bundle["text/html"]) < 60_000
    code = f"import sys, cbref.widgets as w; sys.stdout.buffer.write(w.Quiz({chapter!r}).static_html().encode())"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout
    assert output.decode() == bundle["text/html"]


def test_every_text_is_used():
    text = source("quiz.js", "quiz.py")
    for key in strings.load("quiz"):
        assert re.search(rf"\b{key}\b", text), key
