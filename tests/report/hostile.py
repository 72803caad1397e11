"""A comparison in which everything that a stranger can write is hostile."""

import msgspec

from weighin.measurements import Comparison

SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(2)>"
BREAKERS = "| a | b |\n| --- | --- |\n# head\n> quote\n- item\n*bold* _it_ [link](http://evil.example) ![i](x) ~~gone~~"
FENCE = "```\n````\n`````python\nimport os\n```"
ESCAPES = "\x1b[31mred\x1b]0;title\x07\x9b31m\r\b\x7f\x00"
TURNED = "abc\u202edef\u2066\u200f"
AUTOLINK = "see https://evil.example and www.evil.example"
FORMULA = "=cmd|' /C calc'!A0"
ALL = "\n".join((SCRIPT, BREAKERS, FENCE, ESCAPES, TURNED, AUTOLINK, FORMULA))
SENT_TO_NOBODY = {"\x1b", "\x07", "\x9b", "\r", "\b", "\x7f", "\x00", "\u202e", "\u2066", "\u200f"}


def make(comparison: Comparison) -> Comparison:
    """The finished comparison with hostile answers, prompts, reasons, names and notes."""
    ok, other, failed, cannot = comparison.contenders
    answers = [msgspec.structs.replace(r, text=ALL, thinking=ALL, whole=ALL) for r in ok.responses]
    name = "fake:fp32@cpu+says=<b>|`x`"
    contenders = [
        msgspec.structs.replace(ok, name=name, responses=answers, first_answer=ALL, snippet=FENCE),
        msgspec.structs.replace(other, responses=[msgspec.structs.replace(r, text="") for r in other.responses]),
        msgspec.structs.replace(failed, reason=FORMULA + ESCAPES + SCRIPT + TURNED, remedy=AUTOLINK),
        msgspec.structs.replace(cannot, reason="+1 | " + SCRIPT),
    ]
    prompts = [msgspec.structs.replace(p, text=ALL) for p in comparison.workload.prompts]
    return msgspec.structs.replace(
        comparison,
        contenders=contenders,
        reference=name,
        reference_note=SCRIPT,
        notes=[ALL.replace("\n", " ")],
        model=msgspec.structs.replace(comparison.model, name=SCRIPT + TURNED),
        workload=msgspec.structs.replace(comparison.workload, prompts=prompts, template_note=SCRIPT),
    )
