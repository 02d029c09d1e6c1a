"""The quiz at the end of a chapter: its questions, checked when they are loaded, and the interactive that asks them.

The questions of a chapter are in `cbref/strings/<language>/quiz_<chapter>.json`, as `{"questions": [...]}`.
"""

import html
import json
import math
import re

import traitlets

from cbref import strings as texts
from cbref.widgets.static import StaticTwin, source

_FIELDS = {  # kind: (required, optional with their defaults)
    "choice": ({"id", "kind", "ask", "options"}, {}),
    "number": ({"id", "kind", "ask", "answer", "right", "wrong"}, {"tolerance": 0, "unit": "", "near": []}),
}


class Quiz(StaticTwin):
    """The questions of one chapter. The reader's answers stay in the page: none is stored or sent.

    Args:
        chapter: whose questions; a chapter has some if there is a `quiz_<chapter>.json`.
        language: of the texts; see `cbref.strings.load`.

    Raises:
        ValueError: no such chapter or language, or the file is malformed; see `load_quiz`.
    """

    kind = "quiz"
    _esm = source("dom.js", "quiz.js")
    _css = source("theme.css", "quiz.css")

    questions = traitlets.List(traitlets.Dict()).tag(sync=True)
    strings = traitlets.Dict().tag(sync=True)

    def __init__(self, chapter: str, language: str | None = None):
        super().__init__(questions=load_quiz(chapter, language), strings=texts.load("quiz", language))

    def summary(self) -> str:
        return self.strings["summary"].format(count=len(self.questions))

    def picture(self) -> str:
        asked = [f"<li>\n<p>{_markup(one['ask'])}</p>\n{self._expected(one)}\n</li>" for one in self.questions]
        solved = [f"<li>\n{self._solution(one)}\n</li>" for one in self.questions]
        summary = f"<summary>{html.escape(self.strings['answers'])}</summary>"
        lang = html.escape(self.strings["lang"])
        lines = [f'<div class="cbq cbq-picture" lang="{lang}">', "<ol>", *asked, "</ol>"]
        return "\n".join([*lines, "<details>", summary, "<ol>", *solved, "</ol>", "</details>", "</div>"])

    def _expected(self, question: dict) -> str:
        if question["kind"] == "choice":
            return "<ul>\n" + "\n".join(f"<li>{_markup(one['text'])}</li>" for one in question["options"]) + "\n</ul>"
        key = "answer_unit" if question["unit"] else "answer_number"
        return f"<p>{_markup(self.strings[key].format(unit=question['unit']))}</p>"

    def _solution(self, question: dict) -> str:
        if question["kind"] == "choice":
            answers = [(one["text"], one["why"], one["right"]) for one in question["options"]]
        else:
            near = [(one["value"], one["why"], False) for one in question["near"]]
            answers = [(question["answer"], question["right"], True), *near]
            answers = [(self._amount(value, question["unit"]), why, right) for value, why, right in answers]
        answers.sort(key=lambda answer: not answer[2])  # the right one first, the others as they were
        right, *wrong = (self._reason(*answer) for answer in answers)
        others = ["<ul>", *(f"<li>{one}</li>" for one in wrong), "</ul>"] if wrong else []
        return "\n".join([f"<p>{right}</p>", *others])

    def _reason(self, answer: str, why: str, right: bool) -> str:
        verdict = html.escape(self.strings["right_answer" if right else "wrong_answer"])
        return f"{verdict} <strong>{_markup(answer)}</strong><br>{_markup(why)}"

    def _amount(self, value: float, unit: str) -> str:
        return self.strings["amount"].format(value=f"{value:,}", unit=unit).strip()


def load_quiz(chapter: str, language: str | None = None) -> list[dict]:
    """Return the questions of `chapter`, in the order of the file, with every optional field filled in.

    A question that `language` does not have yet is English.

    Raises:
        ValueError: there is no such chapter or language; or a file is malformed: the message names question and field.
    """
    folder = texts._ROOT / texts._ENGLISH
    chapters = sorted(file.stem.removeprefix("quiz_") for file in folder.glob("quiz_*.json"))
    if chapter not in chapters:
        raise ValueError(f"no quiz for chapter {chapter!r}; there are: {', '.join(chapters) or 'none'}")
    english = _read(chapter, texts._ENGLISH)
    translated = {question["id"]: question for question in _read(chapter, language)}
    questions = [translated.get(question["id"], question) for question in english]
    for one, other in zip(english, questions, strict=True):
        for field, value in _solution_of(one).items():
            if _solution_of(other).get(field) != value:
                raise ValueError(f"{_where(chapter, one['id'])}: field {field!r} of the translation is another answer")
    return questions


def _solution_of(question: dict) -> dict:
    """What a translation must not change."""
    if question["kind"] == "choice":
        return {"kind": "choice", "options": [option["right"] for option in question["options"]]}
    return {name: question[name] for name in ("kind", "answer", "tolerance")}


def _where(chapter: str, question: str | int) -> str:
    return f"quiz_{chapter}.json, question {question!r}"


def _read(chapter: str, language: str | None) -> list[dict]:
    file = f"quiz_{chapter}"
    try:
        raw = texts.load(file, language)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}.json is not JSON: {error}") from None
    except AttributeError:  # a list, which has no keys to merge
        raw = {}
    if set(raw) != {"questions"} or not isinstance(raw["questions"], list) or not raw["questions"]:
        raise ValueError(f"{file}.json must hold one field, 'questions', which is a list of at least one question")
    questions = []
    for number, one in enumerate(raw["questions"], start=1):
        name = one.get("id", number) if isinstance(one, dict) else number
        question = _checked(one, _where(chapter, name))
        if question["id"] in [other["id"] for other in questions]:
            raise ValueError(f"{_where(chapter, name)}: field 'id' is that of another question too")
        questions.append(question)
    return questions


def _checked(raw, where: str) -> dict:
    """One question of the file, with defaults filled in; a `ValueError` if something is not as it should be."""

    def need(holds: bool, field: str, rule: str, value) -> None:
        if not holds:
            raise ValueError(f"{where}: field {field!r} must be {rule}, got {value!r}")

    def fields(value, field: str, required: set, optional: dict) -> None:
        need(isinstance(value, dict), field, "an object", value)
        if missing := sorted(required - set(value)):
            raise ValueError(f"{where}: field {_inside(field, missing[0])!r} is missing")
        if unknown := sorted(set(value) - required - set(optional)):
            raise ValueError(f"{where}: field {_inside(field, unknown[0])!r} is not known")

    def text(value, field: str, empty: bool = False) -> None:
        need(isinstance(value, str) and (empty or value.strip() != ""), field, "a text", value)
        need(value.count("`") % 2 == 0, field, "a text whose backticks come in pairs", value)

    def number(value, field: str) -> None:
        real = isinstance(value, int | float) and not isinstance(value, bool)
        need(real and math.isfinite(value), field, "a number", value)

    need(isinstance(raw, dict), "question", "an object", raw)
    kinds = " or ".join(map(repr, _FIELDS))
    need(isinstance(raw.get("kind"), str) and raw["kind"] in _FIELDS, "kind", kinds, raw.get("kind"))
    required, optional = _FIELDS[raw["kind"]]
    fields(raw, "", required, optional)
    question = optional | raw
    name = question["id"]
    rule = "small letters, digits and single hyphens, a letter first"  # a test names a function after it
    need(isinstance(name, str) and re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) is not None, "id", rule, name)
    text(question["ask"], "ask")

    if question["kind"] == "choice":
        options = question["options"]
        need(isinstance(options, list) and len(options) >= 2, "options", "a list of two or more", options)
        for at, option in enumerate(options):
            field = f"options[{at}]"
            fields(option, field, {"text", "right", "why"}, {})
            text(option["text"], f"{field}.text")
            text(option["why"], f"{field}.why")
            need(isinstance(option["right"], bool), f"{field}.right", "true or false", option["right"])
        answers = [option["text"] for option in options]
        need(len(set(answers)) == len(answers), "options", "all different", answers)
        right = [option["text"] for option in options if option["right"]]
        need(len(right) == 1, "options", "exactly one that is right", right)
        return question

    for field in ("right", "wrong"):
        text(question[field], field)
    text(question["unit"], "unit", empty=True)
    number(question["answer"], "answer")
    number(question["tolerance"], "tolerance")
    need(question["tolerance"] >= 0, "tolerance", "0 or more", question["tolerance"])
    need(isinstance(question["near"], list), "near", "a list", question["near"])
    for at, near in enumerate(question["near"]):
        field = f"near[{at}]"
        fields(near, field, {"value", "why"}, {})
        number(near["value"], f"{field}.value")
        text(near["why"], f"{field}.why")
        wrong = abs(near["value"] - question["answer"]) > question["tolerance"]
        need(wrong, f"{field}.value", "outside of the tolerance around the answer", near["value"])
    return question


def _inside(field: str, name: str) -> str:
    return f"{field}.{name}" if field else name


def _markup(text: str) -> str:
    """As HTML, with `code` in backticks."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text, quote=False))
