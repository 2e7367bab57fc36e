# ruff: noqa: E501, RUF001 - wordings read best on one line, and × is the right sign
"""Small sums, counting, and the order of days and months: questions drawn at random, answers computed."""

from random import Random

from .patterns import expand

WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
TENS = (
    "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety",
)  # fmt: skip
DAYS = (
    "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday",
)  # fmt: skip
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December",
)  # fmt: skip

FRAMES = (
    "@",
    "@",
    "@=",
    "@ =",
    "@ = ?",
    "@?",
    "{what is|what's|whats|how much is|what does|calculate|compute|work out|solve|tell me|give me|quick:|please calculate} @",
    "{can you do|do|try|try this:|what about|so|then|ok,|say,|first} @{ then| first| next|}",
    "@ {comes to|comes to what|adds up to what|will be|would be|gives what|makes what|are|amounts to}",
    "@ {is|makes|gives|equals|is equal to|is how much|is what}{ ?|}",
    "{what's the {total|sum|result} of|what does one get for|let me know|i want to know what is|what would be|hey what's|ok what is} @",
    "{what is|what's|how much is} @{ please| then| in total| altogether|}",
    "{can|could} you {calculate|compute|add up|work out|tell me|solve|do} @{ for me|}",
    "{do you know|i need to know|and what is|and|and now|now|how about|what about} @",
    "{what do i get for|what is the result of|what is the answer to|the result of|result:} @",
)
PLUS = (
    "{a}+{b}",
    "{a} + {b}",
    "{a} plus {b}",
    "{a} and {b} together",
    "{a} added to {b}",
    "{a} +{b}",
    "the sum of {a} and {b}",
)
PLUS_WORDED = (
    "{add|sum up} {a} {and|to|plus} {b}",
    "what do you get {if|when} you add {a} {and|to} {b}",
    "i have {a} {apples|books|coins|euros|tokens|blocks|files|friends|cats} and {get|buy|find|receive} {b} more, how many {do i have|are there|is that}{ now|}",
    "{tom|maria|she|he|my brother|a farmer} has {a} {apples|cards|sheep|balls|marbles} and {buys|finds|gets|is given} {b} more{, how|. how} many {does he have|has she|are there now|does she have now|in total}",
    "{tom|maria|a shop|the box} had {a} {apples|cards|books|pencils}{,| and} then {got|received|bought} {b}{ more|}{, how|. how} many {now|are there now|are there in all}",
    "{can|could} you {add|sum|sum up} {a} and {b}{ for me|}",
    "there are {a} {birds|cars|people|requests|cups} and {b} more {come|arrive|join}, how many are {there|there now}",
    "{increase {a} by {b}|{a} increased by {b}|what is {b} more than {a}}",
    "{sum|total} of {a} and {b}",
    "{what's|what is} the {total|sum|result} {if|when} i add {a} {to|and} {b}",
    "if i put {a} and {b} together, what is the {total|sum|result}",
)
MINUS = (
    "{a}-{b}",
    "{a} - {b}",
    "{a} minus {b}",
    "{a} less {b}",
    "{a} take away {b}",
    "the difference {between|of} {a} and {b}",
)
MINUS_WORDED = (
    "{subtract|take away|take|deduct|remove} {b} from {a}",
    "i have {a} {apples|books|coins|euros|tokens|blocks|sweets} and {lose|eat|spend|give away|sell|use} {b}, how many {are left|do i have left|remain}",
    "{tom|maria|she|he|my sister|a baker} {has|had} {a} {apples|cards|cakes|balls|coins} and {loses|sells|eats|gives away|lost|sold} {b}{, how|. how} many {are left|does he have left|has she left|remain}",
    "{there were|i had|we had|she had} {a} {blocks|tokens|stickers|tickets|eggs|euros|cups} and {gave|sold|used|freed|lost|broke} {b}{ to my sister| of them| to a friend|}, how many {are left|do i still have|remain|are there now}",
    "{there are|there were} {a} {birds|people|tokens|cars|seats} and {b} {leave|go away|fly away|are taken|left|are removed}{, how|. how} many {are left|stay|remain|are still there}",
    "{can|could} you {subtract|take} {b} from {a}{ for me|}",
    "what is left {if|when} {i|you} take {b} from {a}",
    "{decrease {a} by {b}|{a} decreased by {b}|{a} reduced by {b}|what is {b} less than {a}}",
    "how {much|many} {is|are} left of {a} after {taking|using} {b}",
)
TIMES = (
    "{a}*{b}",
    "{a} * {b}",
    "{a}x{b}",
    "{a} x {b}",
    "{a} times {b}",
    "{a} multiplied by {b}",
    "the product of {a} and {b}",
    "{a} × {b}",
)
TIMES_WORDED = (
    "multiply {a} {by|with|and} {b}",
    "{a} {boxes|bags|rows} {of|with} {b} {apples|books|eggs|seats}, how many in {all|total}",
)
DIVIDE = ("{a}/{b}", "{a} / {b}", "{a} divided by {b}", "{a} : {b}", "{a} ÷ {b}", "{a} over {b}")
DIVIDE_WORDED = (
    "divide {a} by {b}",
    "share {a} {apples|sweets|coins} {among|between} {b} {friends|people|children}, how many {each|does each get}",
)

COUNT_UP = (
    "{count|count up|can you count|please count|could you count|count for me|let us count} to {a}{ please| for me| now| here| aloud|}",
    "{count|list the numbers|name the numbers|say the numbers|numbers} from {1|one} to {a}",
)
COUNT_DOWN = (
    "{count down|count backwards|countdown|count back|do a countdown|can you count down} from {a}{ to 1|}",
)
NEXT = (
    "{what|which number} comes {after|right after|next after|directly after} {a}",
    "{what is|name|tell me} {the next number after|the number after|the next number from|the successor of} {a}",
    "{the number|number} after {a}",
)
PREVIOUS = (
    "{what|which number} comes {before|right before|directly before|just before} {a}",
    "{what is|name|tell me} {the number before|the previous number before} {a}",
)
LARGER = (
    "{which is|what is|which number is|what's|is} {larger|bigger|greater|more}{,|:|} {a} or {b}",
    "which {one |}is the {larger|bigger|greater} {number|one}{,|:|} {a} or {b}",
    "{the larger of|the maximum of|max of|which is larger of} {a} and {b}",
    "is {a} {larger|bigger|greater|more} than {b}",
)
SMALLER = (
    "{which is|what is|which number is|what's|is} {smaller|less|lower}{,|:|} {a} or {b}",
    "{the smaller of|the minimum of|min of|which is smaller of} {a} and {b}",
    "is {a} {smaller|less|lower} than {b}",
)
PARITY = (
    "is {a} {even|odd|an even number|an odd number|even or odd|odd or even}",
    "{a}: {even or odd|odd or even}",
    "{a}, is that {even|odd}",
)
AFTER = (
    "{what|which} {UNIT |}{comes|is} {after|right after|next after|following} NAME",
    "{UNIT after|the UNIT after|what is the UNIT after|what follows|name the UNIT after|the UNIT that follows} NAME",
    "{if today is|if it is|suppose it is} NAME{ now|}, {what|which} {UNIT |}{comes next|is next|follows}",
)
BEFORE = (
    "{what|which} {UNIT |}{comes|is} {before|right before|just before} NAME",
    "{UNIT before|the UNIT before|what is the UNIT before|name the UNIT before} NAME",
)
ALL_DAYS = (
    "{name|list|what are|tell me|say|give me} {the |all |all the |}{days of the week|seven days|weekdays|days of a week}",
    "how many days {are in|does} a week{ have|}",
    "{days of the week|days in a week|the days of the week|which days are there}",
)
ALL_MONTHS = (
    "{name|list|what are|tell me|say|give me} {the |all |all the |}{months|months of the year|twelve months}",
    "how many months {are in|does} a year{ have|}",
    "{months of the year|the months|which months are there|months in a year}",
)

TOO_LARGE = "That sum is too large for me: I add and subtract numbers up to 100 and know the multiplication table up to 12."
HARD_SUMS = (
    "{what is|calculate|compute|} {the square root of|the logarithm of|the sine of|the cube root of|the factorial of} #",
    "{what is|what's|} {#|#.#} {to the power of|^|**} #",
    "{what is|what's|how much is|calculate|} {###|####|#####} {times|*|x|plus|+|minus|-|divided by|/} {###|####|##}",
    "{what is|how much is|} ## {times|*|x} {##|#}",
    "{what is|how much is|} ##{.|,}## {+|-|times|plus} #{.|,}#",
    "{what is|how much is|} {##|#} {percent|%} of {###|####}",
    "{solve|what is x in|find x:} #x {+|-} # = ##",
    "{what is|tell me|} {pi|the value of pi|the 10th prime|the integral of x|the derivative of x squared}",
)


def number_word(value: int) -> str:
    """Return the English word for 0..100."""
    if value <= 20:
        return WORDS[value]
    if value == 100:
        return "a hundred"
    tens, ones = divmod(value, 10)
    return TENS[tens - 2] + (f"-{WORDS[ones]}" if ones else "")


def fill(rng: Random, pattern: str, a: int, b: int) -> str:
    """Expand a pattern and put the numbers in, sometimes as words."""
    worded = (
        max(a, b) <= 100
        and rng.random() < 0.12
        and not set("+-*/=x×÷:") & set(pattern.replace("{a}", "").replace("{b}", ""))
    )
    left, right = (number_word(a), number_word(b)) if worded else (str(a), str(b))
    text = expand(rng, pattern.replace("{a}", "\x01").replace("{b}", "\x02"))
    return text.replace("\x01", left).replace("\x02", right)


def framed(rng: Random, expressions: tuple[str, ...], sentences: tuple[str, ...], a: int, b: int) -> str:
    """Return one wording of a sum: an expression in a frame, or a sentence of its own."""
    if rng.random() < 0.3:
        return fill(rng, rng.choice(sentences), a, b)
    return expand(rng, rng.choice(FRAMES)).replace("@", fill(rng, rng.choice(expressions), a, b))


def operand(rng: Random) -> int:
    """Draw 0..100, small numbers more often."""
    return rng.randint(0, 12) if rng.random() < 0.3 else rng.randint(0, 100)


def worked_sum(a: int, sign: str, b: int) -> str:
    """Return a sum with its steps, tens before ones: what a small model must not do in one go."""
    tens, ones = b - b % 10, b % 10
    if not tens or not ones or a < 10:
        return f"{a} {sign} {b} = {a + b if sign == '+' else a - b}."
    between = a + tens if sign == "+" else a - tens
    result = between + ones if sign == "+" else between - ones
    return f"{a} {sign} {b} = {a} {sign} {tens} {sign} {ones} = {between} {sign} {ones} = {result}."


def addition(rng: Random) -> tuple[str, str]:
    a, b = operand(rng), operand(rng)
    return framed(rng, PLUS, PLUS_WORDED, a, b), worked_sum(a, "+", b)


def subtraction(rng: Random) -> tuple[str, str]:
    a, b = operand(rng), operand(rng)
    if a < b and rng.random() < 0.8:
        a, b = b, a
    answer = worked_sum(a, "-", b) if a >= b else f"{b} - {a} = {b - a}, so {a} - {b} = -{b - a}."
    return framed(rng, MINUS, MINUS_WORDED, a, b), answer


def multiplication(rng: Random) -> tuple[str, str]:
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    return framed(rng, TIMES, TIMES_WORDED, a, b), f"{a} × {b} = {a * b}."


def division(rng: Random) -> tuple[str, str]:
    quotient, b = rng.randint(0, 12), rng.randint(1, 12)
    return framed(rng, DIVIDE, DIVIDE_WORDED, quotient * b, b), f"{quotient * b} / {b} = {quotient}."


def double_or_half(rng: Random) -> tuple[str, str]:
    a = rng.randint(1, 50)
    if rng.random() < 0.5:
        return fill(
            rng, "{double|twice|what is double|what is twice|what's the double of} {a}", a, 0
        ), f"2 × {a} = {a} + {a} = {2 * a}."
    question = "{half of|what is half of|what's the half of|half|how much is half of} {a}"
    return fill(rng, question, 2 * a, 0), f"{2 * a} / 2 = {a}."


def three_terms(rng: Random) -> tuple[str, str]:
    a, b, c = (rng.randint(1, 9) for _ in range(3))
    sign = rng.choice(("+", " + ", " plus "))
    text = expand(rng, rng.choice(FRAMES)).replace("@", f"{a}{sign}{b}{sign}{c}")
    return text, f"{a} + {b} + {c} = {a + b} + {c} = {a + b + c}."


def hard_sum(rng: Random) -> tuple[str, str]:
    text = expand(rng, rng.choice(HARD_SUMS))
    return "".join(str(rng.randint(2, 9)) if c == "#" else c for c in text), TOO_LARGE


def counting(rng: Random) -> tuple[str, str]:
    n = rng.randint(2, 20)
    kind = rng.randrange(4)
    if kind == 0:
        return fill(rng, rng.choice(COUNT_UP), n, 0), ", ".join(map(str, range(1, n + 1))) + "."
    if kind == 1:
        n = rng.randint(2, 10)
        return fill(rng, rng.choice(COUNT_DOWN), n, 0), ", ".join(map(str, range(n, 0, -1))) + "."
    n = rng.randint(1, 99)
    if kind == 2:
        return fill(rng, rng.choice(NEXT), n, 0), f"After {n} comes {n + 1}."
    return fill(rng, rng.choice(PREVIOUS), n, 0), f"Before {n} comes {n - 1}."


def comparison(rng: Random) -> tuple[str, str]:
    a, b = rng.sample(range(101), 2)
    if rng.random() < 0.6:
        return fill(rng, rng.choice(LARGER), a, b), f"{max(a, b)} is larger than {min(a, b)}."
    return fill(rng, rng.choice(SMALLER), a, b), f"{min(a, b)} is smaller than {max(a, b)}."


def parity(rng: Random) -> tuple[str, str]:
    a = rng.randint(0, 100)
    return fill(rng, rng.choice(PARITY), a, 0), f"{a} is {'odd' if a % 2 else 'even'}."


def calendar(rng: Random) -> tuple[str, str]:
    names, unit = (DAYS, "day") if rng.random() < 0.6 else (MONTHS, "month")
    kind = rng.randrange(4)
    if kind == 3:
        answer = f"The {'seven days' if unit == 'day' else 'twelve months'} are {', '.join(names[:-1])} and {names[-1]}."
        return expand(rng, rng.choice(ALL_DAYS if unit == "day" else ALL_MONTHS)), answer
    i = rng.randrange(len(names))
    before = kind == 2
    text = (
        expand(rng, rng.choice(BEFORE if before else AFTER)).replace("UNIT", unit).replace("NAME", names[i])
    )
    return (
        text,
        f"Before {names[i]} comes {names[i - 1]}."
        if before
        else f"After {names[i]} comes {names[(i + 1) % len(names)]}.",
    )


KINDS = (
    addition,
    subtraction,
    multiplication,
    division,
    double_or_half,
    three_terms,
    hard_sum,
    counting,
    comparison,
    parity,
    calendar,
)
KIND_WEIGHTS = (8.0, 8.0, 4.0, 2.0, 1.0, 1.0, 1.5, 1.5, 1.0, 0.7, 2.0)


def draw(rng: Random) -> tuple[str, str]:
    """Return one random question with its answer."""
    return rng.choices(KINDS, KIND_WEIGHTS)[0](rng)
