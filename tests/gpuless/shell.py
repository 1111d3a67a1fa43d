"""A process that a test talks with: lines of JSON, each a piece of Python, answered by what it gives.

A script, with the name of the module that it begins with: `Rig.shell` starts it in a process that knows nothing of these tests.
"""

import ast
import importlib
import json
import sys
import traceback


def give(code: str, names: dict[str, object]) -> object:
    """Run statements; the value of the last one, where that is an expression."""
    *statements, last = ast.parse(code).body or [ast.Pass()]
    exec(compile(ast.Module(statements, []), "<test>", "exec"), names)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), "<test>", "eval"), names)
    exec(compile(ast.Module([last], []), "<test>", "exec"), names)
    return None


def answer(code: str, names: dict[str, object]) -> dict[str, object]:
    """As JSON can have it; an error as its type, text and traceback."""
    try:
        return {"value": give(code, names)}
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error), "traceback": traceback.format_exc()}


def begin(module: str) -> dict[str, object]:
    """The names that the test's pieces have from the beginning."""
    names: dict[str, object] = {module: importlib.import_module(module)}
    if module == "torch":  # nothing of cuDNN is stood in for
        give("torch.backends.cudnn.enabled = False; torch.backends.cuda.enable_cudnn_sdp(False)", names)
    return names


def main(module: str) -> None:
    """Until the other end closes."""
    replies, sys.stdout = sys.stdout, sys.stderr
    names = begin(module)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line), names), default=str), file=replies, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
