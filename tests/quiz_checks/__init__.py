"""The answers of the quizzes, worked out by the engine: a module a chapter, a function a numeric question.

The function is named like the question's id, with underscores, and returns the number.
"""
