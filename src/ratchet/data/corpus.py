"""The bundled corpus: customer requests with their intent, and related plain text without any label.

    python -m ratchet.data.corpus data      # writes data/raw/support.csv, data/raw/support.jsonl, data/text/help.txt

Everything is invented and drawn from phrase tables by seeded generators: the same code writes the same bytes on every
machine (they use nothing but `Random.random`, whose sequence Python promises to keep). The two outputs share words but
no sentences: a label stands beside a request in `raw`, and `text` holds no request at all.

The task is meant to be learnable but not trivial: a third of the requests mention another intent in passing, some have
typing errors, and intents share their vocabulary.
"""

import csv
import io
import json
import re
import sys
from bisect import bisect
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import TypeVar

from ratchet.data.phrases import INTENTS, SLOTS, Intent, entries

CSV_ROWS, JSONL_ROWS, TEXT_LINES = 2400, 1800, 2000
CHANNELS = ("email", "chat", "web form", "phone note")

GREETINGS = entries("""
[Hi|Hello|Hey|Good morning|Good afternoon|Dear team|Hi there|Hello again][,|!]
To whom it may concern,
[Quick question|Question for you|Me again|Sorry to bother you][:|,|.]
""")

CONTEXTS = entries("""
I have been [buying from you|a customer|ordering here] [for years|since last spring|for about {n} months].
[Order|Order number|Ref|It is about order] {order}.
I [love|really like|enjoy] {coffee} [and have told everybody|by the way].
[Writing|This is] [on behalf of|for] my {person}, who does not [do email|like computers].
I am [in|writing from] {city}.
[I tried to phone|I tried the chat|I rang twice] but [nobody answered|the line was busy|got cut off].
We are [a family of {n}|two heavy coffee drinkers|a small household].
I could not find [this|an answer] on your [site|help pages].
""")

ASIDES = entries("""
[This is not about|It has nothing to do with|Please ignore my earlier message about|I am not asking about] {aside}.
[Thanks for sorting out|Thank you for your quick help with|You were great with] {aside} [last time|last month|in May].
[My {person}|A friend of mine] [wrote|has already written|called] [to you|] about {aside}[, mine is a different
    matter|].
[First|Last month|A while ago|In spring] [it was|there was] {aside}[, and now this|. Today it is something else].
[We can talk about|I will come back to|Leave aside] {aside} [another time|later|some other day].
[The matter of|The question of|That thing with] {aside} [is settled|has been dealt with|turned out fine][, thanks|].
""")

CLOSINGS = entries("""
[Thanks|Many thanks|Thank you|Cheers|Thanks in advance][!|.|]
[Please help|Help please|Any help is welcome][!|.]
[Could you look into it|Can you sort that out|What should I do now|What happens next]?
Please [reply|answer] [soon|by email|today].
[Best|Kind regards|Best wishes], [Mira|Tom|A. Okafor|Jo|Priya|Mr Lund|Hanna|Sam W.]
[Sorry for the long message|Have a nice day].
""")

ARTICLES = {
    name: tuple(sentences.split(" // "))
    for name, sentences in (
        entry.split(": ", 1)
        for entry in entries("""
late_delivery: Most boxes take two [working|] days, but a late delivery can happen when [the courier is busy|the roads
    are icy]. // If a delivery is more than {n} days late, we send a new one [at no cost|] and ask the courier what
    went wrong.
missing_parcel: A missing parcel is often with a neighbour, in a shed or [behind the bins|at the depot], so [look|ask]
    there first. // When a parcel is lost or stolen we need {n} days to ask the driver for the photo of the door.
damaged_parcel: Take a photo of a damaged parcel before you throw away the cardboard: a broken {part} or a torn bag is
    our loss. // Boxes that were crushed in the post are replaced [the same week|on {day}], and nobody has to return
    the pieces.
wrong_item: People pack our boxes, and now and then a wrong item goes in: [keep it|drink it] and we post the right
    one. // The label on every item shows a name and a roast, so a mix-up of {coffee} and {coffee} is easy to see.
missing_item: A missing item may follow in a second box, because {thing} and coffee leave from different rooms. // The
    slip lists what was packed; when an item is missing from it, the shelf was empty {day}.
track_order: To track an order, open the link that we email when the box leaves: it shows [the depot|the van] and the
    hour. // An order can be tracked from the evening on which the courier scans it; until then the page is empty.
change_address: You can change the address of the next box until {day} at noon, in your account under delivery. // A
    change of address counts for all later boxes; a single box can also go to {city} or to your {person}.
cancel_order: You can cancel an order until it is packed, and the money goes back [at once|the same day]. // An order
    that was sent cannot be cancelled any more, but it can be refused at the door.
change_order: To change an order, add or remove a {thing} while its state is open; the total is worked out again. //
    The grind and the size of a bag may change until the order is on the bench, which is about {n} hours.
return_item: To return an item, print the label and bring the {machine} to any post office within {n}0 days. // An
    opened bag cannot be returned, an unused {machine} can, with its {part} and the box it came in.
refund_status: A refund leaves us {n} days after a return is checked, and its status is shown beside the order. //
    Banks differ: a refund to a card takes up to {n} days, a refund to a gift card none.
double_charge: What looks like a double charge is often a hold: the bank drops the second one after {n} days. // If
    both charges are still there a week later, [we pay one back|one of them is returned] within the hour.
payment_declined: A payment is declined by the bank and not by us, mostly because a code was not confirmed in time. //
    After {n} declined payments the basket waits for a day; the coffee in it stays yours.
update_card: You can update the card for a subscription at any time, and the old number is deleted. // A card that
    runs out is updated by most banks; if yours does not, we write before the next box.
discount_code: A discount code is typed into the field below the basket, before the payment, and counts once. // Codes
    from the newsletter give a discount on coffee but not on a {machine}, and end after {n} weeks.
request_invoice: You can request an invoice with the name of a firm in the list of orders; it comes as a PDF. // Every
    invoice shows the tax; the slip in the box is not an invoice.
pause_subscription: To pause a subscription, choose the weeks in which you are away; it goes on by itself. // A pause
    costs nothing and may last {n} months, and the subscription keeps its price.
cancel_subscription: You can cancel a subscription until the evening before the roast, without giving a reason. // A
    cancelled subscription ends with the box that is already paid, and may be started anew.
delivery_frequency: The delivery frequency goes from every week to every {n} weeks: two cups a day are about one bag
    in ten days. // A new frequency starts after the next delivery, so that no box is sent twice.
swap_coffee: You can swap the coffee in a box as often as you like, for instance {coffee} against {coffee}. // A swap
    made before {day} is in time for the next roast; later ones wait for the one after.
stale_coffee: Coffee turns stale with air and light, so we roast on {day} and post the next morning. // If a bag
    smells stale or flat, tell us the date on its back: the whole batch is then tasted.
brewing_advice: Our brewing advice for {brewer}: sixty grams a litre, water just off the boil, {n} minutes. // A cup
    that is {trouble} needs another grind: finer when it is weak or sour, coarser when it is bitter.
allergy_question: Any question about an allergy is answered by the list on the bag: no {allergen} is used in plain
    coffee. // The tasting set is packed beside chocolate, so an allergy to {allergen} or {allergen} needs care.
machine_fault: Most faults of a {machine} are lime: descale the machine and let it cool before you call it broken. //
    A machine with a fault is repaired for two years; the {part} is checked first.
spare_part: Every spare part has a number on its back, and a {part} for an old {machine} is kept for ten years. // A
    spare {part} is posted in an envelope; the part is not part of the guarantee when it is worn.
login_problem: A problem with the login is solved by a new password in most cases; the email comes within {n} minutes.
    // After {n} wrong passwords the login is closed for an hour, which is no problem of your account.
close_account: You can close an account in the profile; invoices are kept for as long as the law asks for. // When an
    account is closed, names, cards and addresses are deleted within {n} days.
gift_order: A gift order carries no prices, and a card with your words is printed for it. // Order a gift {n} days
    ahead, choose the day, and your {person} gets an email only afterwards.
wholesale_enquiry: For a wholesale enquiry from a {business}, tell us the kilos a month and the machine you have. //
    Wholesale prices start at {n}0 kilos; an enquiry is answered by the roasters themselves.
shipping_abroad: Shipping abroad takes {n} to {n}0 days, and customs may ask for a fee in {country}. // We are
    shipping to {country} and {country}; abroad, glass is not insured.
""")
    )
}

EVERYDAY = entries("""
[{name}|My {person}] [walked|drove|cycled|took the train] to {city} [in the rain|before sunrise|on {day}] [to see|to
    meet|and met] [an old friend|a doctor|her brother|the new teacher].
There were {n} [birds|children|dogs|boats] [near the river|in the park|behind the school], and {n} of them [were
    gone|slept] by noon.
{name} [bought|sold|carried|baked] {n}0 [apples|eggs|books|loaves] and gave {n} of them to {name}. How many were left
    for the others?
The [shop|library|museum|station] [opens at {n} in the morning|closes early on {day}] because [of the holiday|the roof
    is being mended].
What is [the best way|a good time] to [learn a language|plant tomatoes|paint a wall|cook rice]? [Begin early|Start
    small], and do a little every day.
If a [ticket|lamp|chair|shirt] costs {n} pounds, then {n} of them cost more than {name} has at home.
[Yesterday|This morning|Last winter] the [wind|snow|heat|fog] was so [strong|heavy] that [nobody|hardly anyone] [went
    out|came to work].
[Please|Now|First,] [open|close|clean|fill] the [window|pot|box|bottle], then [wait|count] {n} minutes and
    [look|listen|try] again.
[Water|Sugar|Bread|Money|Time] is [never|often|sometimes] what people [think|say|hope] it is, [said|wrote|thought]
    {name}.
The [team|family|band|class] [needed|wanted|hoped for] [a bigger house|more time|better weather], but [got|found] [a
    small garden|{n} letters].
[He|She] [works|worked] as a [nurse|baker|driver|teacher|farmer] for {n} years, earns {n}00 a week and [saves|spends]
    half of it.
[Why|How|When] does [the moon|a clock|a river|an engine] [change|turn|move]? Because [of its weight|something pushes
    it|it is never quite still].
In {country} [people|families|most of us] [eat late|drink tea|speak two languages], and [the summer is long|trains are
    fast].
[{n} times {n}|{n} plus {n}|Twice {n}] is less than a hundred, so [the answer|the total|the rest] must be small.
My [phone|laptop|computer|radio] [needs|lost] its [battery|signal|screen], and I [cannot|could] [call|reach] [the
    bank|the office|anyone].
[Is it|Was it] [true|fair|possible] that the [city|bank|company] [changed|raised|forgot] [the rules|the price|its
    promise] [again|last year]?
""")

NOTES = entries("""
{coffee} is [a light|a dark|a gentle|our oldest] roast with [notes|a hint] of [cherry|cocoa|walnut|honey|orange peel],
    good in {brewer}.
The {machine} comes with a {part} and weighs {n} pounds; it costs {amount} [in the shop|this season].
Agent: Good morning, this is Kettle and Finch, how can I help? Customer: [I have a question|It is about my last box].
Agent: [I am sorry to hear that|Thank you for telling us]. [I will look into it|We will call you back] [today|on
    {day}].
The {business} in {city} serves {coffee}, and its {machine} was repaired {ago}.
""")

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{(\w+)\}")
_ABBREVIATIONS = {"please": "pls", "thanks": "thx", "you": "u", "because": "cos", "and": "&", "are": "r", "to": "2"}
_T = TypeVar("_T")


class Writer:
    """Turns templates into sentences. One writer is one sequence of random choices."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed).random

    def chance(self, probability: float) -> bool:
        return self._random() < probability

    def pick(self, items: Sequence[_T]) -> _T:
        return items[int(self._random() * len(items))]

    def pick_weighted(self, items: Sequence[Intent]) -> Intent:
        bounds = list(accumulate(item.weight for item in items))
        return items[bisect(bounds, self._random() * bounds[-1])]

    def say(self, template: str, given: Mapping[str, str] | None = None) -> str:
        """One sentence from a template: choices first, innermost before outer ones, then slots, which may use them too.

        A slot that occurs twice gets two values. Raises KeyError for a slot that no table knows.
        """
        while match := _CHOICE.search(template):
            template = template[: match.start()] + self.pick(match[1].split("|")) + template[match.end() :]
        while match := _SLOT.search(template):
            value = (given or {}).get(match[1]) or self._fill(match[1])
            template = template[: match.start()] + value + template[match.end() :]
        return re.sub(r" +([,.!?]?)(?= |$)", r"\1", re.sub(r" {2,}", " ", template)).strip()

    def _fill(self, slot: str) -> str:
        if slot == "n":
            return str(2 + int(self._random() * 7))
        if slot == "amount":
            return self.say(f"{5 + int(self._random() * 70)}[.50|.99|||] [pounds|euros|pounds]")
        if slot == "order":
            return f"KF{1000 + int(self._random() * 9000)}"
        return self.pick(SLOTS[slot])


def write_requests(raw_dir: Path) -> None:
    """Write `support.csv` and `support.jsonl`: fields request, intent, channel, received (a date).

    No two requests of the two files are the same when case, spaces and punctuation are left out.
    """
    writer, seen = Writer(seed=7), set[str]()
    rows: list[dict[str, str]] = []
    while len(rows) < CSV_ROWS + JSONL_ROWS:
        intent = writer.pick_weighted(INTENTS)
        request = _request(writer, intent)
        key = " ".join(re.findall(r"\w+", request.lower()))
        if key in seen:
            continue
        seen.add(key)
        received = f"2025-{writer.pick(range(1, 13)):02d}-{writer.pick(range(1, 29)):02d}"
        rows.append({"request": request, "intent": intent.name, "channel": writer.pick(CHANNELS), "received": received})
    table = io.StringIO()
    sheet = csv.DictWriter(table, list(rows[0]), lineterminator="\n")
    sheet.writeheader()
    sheet.writerows(rows[:CSV_ROWS])
    raw_dir.mkdir(parents=True, exist_ok=True)
    (raw_dir / "support.csv").write_text(table.getvalue(), encoding="utf-8", newline="\n")
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows[CSV_ROWS:])
    (raw_dir / "support.jsonl").write_text(lines, encoding="utf-8", newline="\n")


def _request(writer: Writer, intent: Intent) -> str:
    """One message: the request itself among whatever else people write."""
    before: list[str] = []
    after: list[str] = []
    if writer.chance(0.35):
        before.append(writer.say(writer.pick(GREETINGS)))
    if writer.chance(0.3):
        before.append(writer.say(writer.pick(CONTEXTS)))
    if writer.chance(0.33):
        other = writer.pick([other for other in INTENTS if other is not intent])
        aside = writer.say(writer.pick(ASIDES), {"aside": other.aside})
        (before if writer.chance(0.6) else after).append(aside)
    if writer.chance(0.3):
        after.append(writer.say(writer.pick(CLOSINGS)))
    ask = writer.say(writer.pick(intent.asks))
    if ask[-1] not in "?!.":
        ask += writer.pick((".", ".", ".", "!", "..."))
    return _as_typed(writer, " ".join(_capital(part) for part in (*before, ask, *after)))


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _as_typed(writer: Writer, text: str) -> str:
    """The message as it was typed: often in lower case, now and then abbreviated or with a slip of the fingers."""
    if writer.chance(0.15):
        text = text.lower()
    words = text.split(" ")
    if writer.chance(0.07):
        words = [_ABBREVIATIONS.get(word.lower(), word) for word in words]
    if writer.chance(0.15):
        i = writer.pick(range(len(words)))
        at = writer.pick(range(max(1, len(words[i]) - 1)))
        word = words[i]
        if word.isalpha() and len(word) > 3:  # two letters swapped, or one left out
            words[i] = word[:at] + (word[at + 1] + word[at] if writer.chance(0.5) else word[at + 1]) + word[at + 2 :]
    return " ".join(words)


def write_text(text_dir: Path) -> None:
    """Write `help.txt`: pages of the help centre, notes about products, and sentences about nothing in particular.

    One paragraph a line. It shows the words of the labels, and the labels themselves as names of pages.
    """
    writer, seen = Writer(seed=11), set[str]()
    lines: list[str] = []
    while len(lines) < TEXT_LINES:
        line = _page(writer) if writer.chance(0.4) else _paragraph(writer)
        if line not in seen:
            seen.add(line)
            lines.append(line)
    text_dir.mkdir(parents=True, exist_ok=True)
    (text_dir / "help.txt").write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")


def _page(writer: Writer) -> str:
    names = list(ARTICLES)
    name = writer.pick(names)
    first, second = (_capital(writer.say(sentence)) for sentence in ARTICLES[name])
    title = _capital(name.replace("_", " "))
    links = f"See also {writer.pick(names)} and {writer.pick(names)}."
    return writer.pick(
        (f"{title}. {first} {second}", f"{second} {first} {links}", f"{title}: {first}", f"{second} {links}")
    )


def _paragraph(writer: Writer) -> str:
    tables = (EVERYDAY, EVERYDAY, EVERYDAY, NOTES)
    return " ".join(_capital(writer.say(writer.pick(writer.pick(tables)))) for _ in range(writer.pick((1, 2, 2, 3))))


def main(arguments: Sequence[str]) -> None:
    """Write everything below the directory that is named."""
    if len(arguments) != 1:
        sys.exit("usage: python -m ratchet.data.corpus DATA_DIR")
    data = Path(arguments[0])
    write_requests(data / "raw")
    write_text(data / "text")


if __name__ == "__main__":
    main(sys.argv[1:])
