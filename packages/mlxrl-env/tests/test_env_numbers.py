"""Which number a text answers with."""

import time
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlxrl.env import answer_number, math_answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        # plain
        ("72", "72"),
        ("72.0", "72"),
        ("072", "72"),
        ("-3", "-3"),
        ("+3", "3"),
        ("\N{MINUS SIGN}3", "-3"),
        (".5", "1/2"),
        ("-.5", "-1/2"),
        ("0.1", "1/10"),
        ("It is 5.", "5"),
        ("5!", "5"),
        ("(5)", "5"),
        ("**5**", "5"),
        ("x=5", "5"),
        ("\N{ARABIC-INDIC DIGIT THREE}", "3"),
        # the last number counts
        ("7 and 8", "8"),
        ("10-3", "3"),  # a difference, not minus three
        ("10 - 3 = 7", "7"),
        ("f(2)-3", "3"),
        ("from 5 to -3", "-3"),
        ("5-10", "10"),
        ("1, 2, 3", "3"),
        ("at 10:30", "30"),
        ("4/2 = 2", "2"),
        # thousands
        ("1,234", "1234"),
        ("1,234,567.50", "2469135/2"),
        ("12,34", "34"),  # no thousands: two numbers
        ("1,2345", "2345"),
        (r"1{,}000", "1000"),
        (r"1\,000", "1000"),
        # currency, percent, units
        ("$5", "5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        (r"\$1,200.50", "2401/2"),
        ("\N{EURO SIGN}3", "3"),
        ("Rs.500", "500"),
        ("50%", "50"),
        (r"50\%", "50"),
        ("5 apples", "5"),
        ("5kg", "5"),
        ("25 cm^2", "25"),
        ("25 cm^{2}", "25"),
        ("25 cm2", "25"),
        ("25 cm\N{SUPERSCRIPT TWO}", "25"),
        ("60 km/h", "60"),
        ("the 2nd", "2"),
        # fractions
        ("1/2", "1/2"),
        ("-3/4", "-3/4"),
        ("1 / 4", "1/4"),
        ("0.5/2", "1/4"),
        ("1 1/2", "3/2"),
        ("-1 1/2", "-3/2"),
        (r"\frac{1}{2}", "1/2"),
        (r"-\dfrac{3}{4}", "-3/4"),
        (r"\tfrac12", "1/2"),
        (r"1\frac{1}{2}", "3/2"),
        # scientific
        ("3e5", "300000"),
        ("3E-2", "3/100"),
        ("1.5e+3", "1500"),
        ("3 x 10^5", "300000"),
        ("3\N{MULTIPLICATION SIGN}10^5", "300000"),
        (r"-3 \times 10^{-2}", "-3/100"),
        (r"2.5 \cdot 10^{3}", "2500"),
        ("3 eggs", "3"),
        # marks, in their order of weight
        ("so 3. #### 72", "72"),
        ("#### 72\nsince 9 times 8", "72"),
        ("####\n72", "72"),
        ("#### 1\n#### 2", "2"),
        (r"\boxed{72} of 100", "72"),
        (r"\boxed{1} \boxed{\frac{1}{2}}", "1/2"),
        (r"\boxed{\text{72 of } \{5\}}", "5"),
        (r"\boxed{\boxed{7}} 8", "7"),
        (r"{ \boxed{7} } }", "7"),
        (r"\boxed{7} and \boxed{8", "7"),  # the second is not closed
        ("<answer>72</answer> of 100", "72"),
        ("<answer>1</answer> <answer>2</answer>", "2"),
        ("<answer>\n72 apples\n</answer>", "72"),
        (r"<answer>72</answer> \boxed{5} #### 6", "72"),
        (r"\boxed{5} #### 6", "5"),
        ("<answer>72", "72"),  # not closed, so not marked: the last number of the text
    ],
)
def test_a_text_answers_with_the_number(text, number):
    assert answer_number(text) == Fraction(number)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "none",
        "x2",
        "1/0",
        "0/0",
        "10^2",  # a power is no number that is spelled out, and neither 10 nor 2 is meant
        "2^{10}",
        "12^2",
        "1.25^2",
        "10^-3",
        "<answer></answer> 72",  # a mark that holds nothing answers nothing
        r"72 \boxed{}",
        "72 ####",
        "<answer>none</answer> 72",
        "1e999999999",  # would take gigabytes to write out
        "1e-999999999",
        "9" * 101,
        "9" * 5000,  # more digits than Python turns into a number
        "1e" + "9" * 5000,
        "\N{SUPERSCRIPT TWO}",
    ],
)
def test_a_text_answers_with_no_number(text):
    assert answer_number(text) is None


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12, places=4))
def test_every_spelling_of_a_decimal_is_the_same_number(value):
    exact = Fraction(value)
    sign, digits = ("-", f"{-value:f}") if value < 0 else ("", f"{abs(value):f}")
    for text in (
        f"{value:f}",
        f"The answer is {value:f}.",
        f"{value:,f}",
        f"{sign}${Decimal(digits):,f}",
        f"{value:f}000 kg",
        f"{value:e}",
        f"\\boxed{{{value:f}}} 7",
        f"7 <answer>{value:f}</answer> 7",
        f"7 #### {value:f}\n7",
        f"{sign}{digits}/1",
    ):
        assert answer_number(text) == exact, text


@given(st.integers(-999, 999), st.integers(1, 999))
def test_every_spelling_of_a_fraction_is_the_same_number(over, under):
    sign = "-" if over < 0 else ""
    for text in (f"{over}/{under}", f"{over} / {under}", f"{sign}\\frac{{{abs(over)}}}{{{under}}}"):
        assert answer_number(text) == Fraction(over, under)


@given(st.text(alphabet="0123456789.,-+/eE^{}\\ $%xfrac<answer>#\n", max_size=60))
@example("\\frac{1}{0}")
@example("<answer>" * 30)
def test_any_text_is_read_without_an_error(text):
    number = answer_number(text)
    assert number is None or isinstance(number, Fraction)


@pytest.mark.parametrize(
    "unit", ["1,", "9", " ", "<answer>", "\\boxed{", "1 ", "^{", "\\frac{1}", "1/", "####", "\\text{", "$"]
)
def test_a_long_completion_is_read_in_little_time(unit):
    # 20,000 repetitions take a second at most where the time grows with the length, and many minutes where it grows
    # with its square
    begin = time.process_time()
    answer_number("1" + unit * 20_000)
    math_answer("1" + unit * 20_000)
    assert time.process_time() - begin < 20
