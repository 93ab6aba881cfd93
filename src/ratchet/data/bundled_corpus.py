"""Phrase tables of the bundled corpus: what customers of Kettle & Finch, an invented shop for coffee by post, write.

In a template, `[a|b|]` picks one of the alternatives (they nest, and one may be empty) and `{slot}` is filled from
`SLOTS` or, for numbers, by the generator. Several intents share their vocabulary on purpose ("charged", "order",
"arrived", "card"): what tells them apart is the whole sentence.

The tables are text, one entry a line; a line that is indented by four or more belongs to the entry above it.
"""

import csv
import io
import json
import re
import sys
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import TypeVar


def parse_entries(table: str) -> list[str]:
    """The entries of a table, each on one line: continuation lines are joined, blank lines left out."""
    return [line.strip() for line in re.sub(r"\n {4,}", " ", table).splitlines() if line.strip()]


@dataclass(frozen=True)
class CustomerIntent:
    """One thing that customers want."""

    name: str
    """The label."""
    weight: float
    """How often it comes up, relative to the others."""
    aside: str
    """How somebody refers to it in passing, while wanting something else; a noun phrase."""
    asks: tuple[str, ...]
    """Templates of the request itself."""


def _read_intents(table: str) -> tuple[CustomerIntent, ...]:
    """Intents from `name: weight: aside` lines, each followed by its templates, indented by two."""
    intents = []
    for block in re.split(r"\n(?=\w)", table.strip()):
        head, *asks = parse_entries(block)
        name, weight, aside = head.split(": ")
        intents.append(CustomerIntent(name, float(weight), aside, tuple(asks)))
    return tuple(intents)


SLOTS: dict[str, tuple[str, ...]] = {
    name: tuple(values.split(" | "))
    for name, values in (
        entry.split(": ")
        for entry in parse_entries("""
coffee: Morning Lark | Harbour Blend | Red Barn espresso | Dusk decaf | the Sidamo | Slow Sunday | the Huila |
    Blackbird roast | the house filter | the Yirgacheffe | Winter Hearth | Little Owl decaf
machine: grinder | Heron brewer | Wren hand grinder | travel press | kettle | milk frother | drip machine
part: lid | rubber seal | glass jug | burr set | filter basket | plunger | power cable | handle | drip tray
thing: mug | tasting set | descaler | gift tin | tote bag | milk jug | coffee scoop | storage jar | pack of filters
day: Monday | Tuesday | Wednesday | Thursday | Friday | Saturday | yesterday | last week | the weekend
ago: two days ago | a week ago | ten days ago | on Monday | last Friday | earlier this month | ages ago
soon: tomorrow | next week | on Friday | by the weekend | before the holidays | this month | in March
city: Leeds | Bristol | Cardiff | Dundee | York | Galway | Norwich | Bath | Exeter | Hull | Derby
country: Norway | Canada | Spain | Japan | Switzerland | Australia | Portugal | Poland | Mexico
person: sister | dad | flatmate | neighbour | boss | partner | aunt | colleague | grandson | mum
reason: we are away for a while | I am moving house | money is tight | my cupboard is full | the kitchen is being
    redone | I drink less these days | I start a new job | the doctor told me to cut down | we have a new baby
allergen: nuts | gluten | milk | soy | lactose | sulphites | peanuts | caffeine
brewer: a cafetiere | a moka pot | an aeropress | a paper filter | cold brew | an espresso machine | a V60
business: cafe | office | bakery | hotel | bookshop | co-working space | restaurant | school canteen
trouble: sour | bitter | weak | watery | muddy | too strong | thin | harsh
name: Mira | Tom | Ada | Jo | Priya | Hanna | Sam | Ines | Piet | Rosa | Ken | Lena | Omar | Bea
""")
    )
}

INTENTS = _read_intents("""
late_delivery: 1.4: a delivery that came late
    my [parcel|order|box|coffee] [should have been|was due|was supposed to be] here {day} [and|but] there is
      [nothing|no sign of it]
  [you|the site] promised [delivery|it] by {day} and [I am still waiting|the box has not come|we are out of coffee]
  how much longer [will|does] my [order|parcel] take? I [ordered|paid] {ago} [and it said two days|]
  [it has been|that makes] {n} days and the [beans|parcel|coffee] [have|has] [not turned up|not shown up] [yet|]
  the [delivery|box] is [overdue|running late|{n} days behind] [again|], is there a [delay|strike|problem]?
  why is [everything|my order|the post] so slow? it was [meant to|going to] arrive {day}
  still waiting for the [parcel|delivery|{thing}] I ordered {ago}, when will it [finally|] come?
  I needed the {thing} by {day} and the [delivery|courier] has missed [that date|it]
missing_parcel: 1.0: a parcel that vanished
  [tracking|the app|the courier] says [delivered|handed over|left with a neighbour] but [nothing is here|I never got it]
  it is marked as delivered {day} [and yet|but] [no parcel|nothing] [was at my door|is in the porch|has reached me]
  the [driver|courier] claims he left it [by the bins|in the shed|at reception] [and|but] it is [gone|not there]
  I think my [parcel|order] has been [stolen|lost in the post|given to somebody else], no neighbour has it
  [somebody|the photo] shows [my parcel|the box] at [a door that is not mine|the wrong house][, where is it|]
  according to you I [signed for|received] the [box|coffee] {day}, I [did not|was not even at home]
  the parcel [disappeared|went missing] [somewhere|] between the depot in {city} and my [house|flat]
  your email says it [has arrived|was delivered], [my {person} and I|we] [looked everywhere|searched the garden]
damaged_parcel: 1.0: a box that got crushed
  the [box|parcel|tin] [arrived|came] [crushed|torn open|soaking wet|in pieces] and the {thing} is [ruined|dented]
  [one of the bags|the bag of {coffee}] had [burst|split] [in the post|on the way] and beans are everywhere
  the [mug|{part}|jug] was [smashed|cracked|broken] when I [opened|unpacked] the [box|parcel]
  your courier must have [dropped|sat on|thrown] [it|the parcel], [everything inside|all of it] is [dented|broken]
  I have [photos|pictures] of the [state of the box|damage], [half of it|the {machine}] is [bent|scratched|in bits]
  [just unpacked|opened] my order: wet cardboard, a [broken|cracked] {part} and [loose beans|coffee dust]
  the packaging was [far too thin|ripped], so the {thing} did not survive the [journey|trip]
  [came|arrived] {day} with a [big hole|dent] in the [side|lid] and [half the coffee|something] [spilled|leaking out]
wrong_item: 1.0: a mix-up in the packing
  I ordered {coffee} [but|and] [got|received|was sent] {coffee} [instead|]
    [you sent|I was sent] [ground coffee|somebody else's order|the large size|{coffee}], that is not what I
      [chose|bought|asked for]
  the bag in the box [says|is] {coffee}, my [order|receipt] [clearly|] says {coffee}
  there has been a [mistake|mix-up]: a [{machine}|{thing}] came although I [bought|paid for] a {machine}
  this is not [my order|what I wanted]: I [asked for|picked] whole beans and [these are ground|it is ground]
  [wrong|the wrong] [coffee|beans|colour|size] in the [box|parcel], can I get [the right one|what I ordered]?
  [opened the box|unpacked it] and found {coffee}. [Lovely, but not mine|I never ordered that]
  the label has a name from {city} on it and the [contents are|coffee is] not [mine|the kind I ordered]
missing_item: 1.0: something left out of a box
  [one|part] of my order [is|was] [missing|not in the box|left out]: [there is no|I did not get the] {thing}
  I paid for {n} bags [and|but] there [were|are] only [two|one] [in the parcel|inside]
  the box came {day} but [without|minus] the {thing}
  [the|my] {thing} [was not included|never made it into the box], the rest is [fine|here]
  everything arrived [except|apart from] the {thing}[, will it come separately|]
  [unpacked|checked] it twice: {coffee} is there, the {thing} [is not|is nowhere]
  the [packing slip|note in the box] lists a {thing}, but [nobody packed it|it is not there]
  [half of|a third of] the order [is|seems to be] missing, I only got the {thing}
track_order: 1.2: a tracking link
  where [is|can I see where] my [order|parcel] [is|] [right now|at the moment|]?
  [can you|could you] [send|give] me [the|a] tracking [number|link] [for {order}|]
  [has|did] my order [been sent|left the roastery|shipped|go out] [yet|already]?
  the tracking [page|link] [shows nothing|is empty|does not open|has not changed since {day}]
  I would like to [follow|track|check on] [my parcel|the box] I [bought|ordered] {ago}
  what is the [status|state] of order {order}? [no hurry, just curious|I want to be at home for it]
  [which|what] [courier|company] [is bringing|brings] my [box|order] and [roughly when|at what time]?
  I did not [get|receive] [an|any] email [with a link|that says it is on its way], has it been dispatched?
change_address: 1.1: my new address
  I [am moving|have moved|will move] to {city}, please [send|deliver] [the next box|everything] there
  [can you|how do I] [change|update|correct] the [delivery|shipping] address [on my account|for order {order}|]?
  [there is a typo|I made a mistake] in my [street|postcode|house number], it is {n}[0|2|4] [Mill Lane|Elm Close]
  please [deliver|send it] to my [office|{person}] in {city} instead of [my home|the old flat]
  the [postcode|flat number] on [file|my order] is [wrong|out of date], [fix|change] it before [it ships|{day}]
  my [subscription|order] still goes to [the old|my previous] [house|flat], [we live in {city} now|I left it {ago}]
  could the [parcel|box] go to [a different|another] address [this time|from now on]?
  [new house, new street|We have a new home]: where do I [enter|type in] the [details|address] so the coffee finds us?
cancel_order: 1.1: an order I called off
  [please|can you] cancel [my order|order {order}|what I ordered {ago}], [I no longer need it|it was a mistake|]
  I [clicked|pressed] buy [too early|twice|by accident], [stop|cancel] [that|the] order before it [ships|goes out]
  [changed my mind|my {person} already has one]: I do not want the {thing} after all, it has not been sent yet
  is it too late to [call off|withdraw|cancel] [the|my] order from {day}?
  [don't|do not] [send|ship] order {order}, I [found it elsewhere|bought the wrong thing|cannot afford it]
  how [do|can] I undo my order [of|for] a {machine}?
  my [son|{person}] ordered {n} bags [without asking|on my phone], please [scrap|cancel] the [whole thing|order]
  I want to [annul|cancel] my purchase of the {machine}, it is still [being prepared|in processing]
change_order: 0.9: an extra bag in my order
  can I [add|put] [a {thing}|another bag|{coffee}] [to|into] [my order|order {order}] before it [ships|leaves]?
  [I forgot|we forgot] [the|a] {thing}, could you [add it to|include it in] the [box|order] I placed {day}?
  please [take|remove] the {thing} [out of|from] my order [and keep the rest|, the others stay]
  I would like [{n} bags instead of one|the small bag instead of the big one] in [today's order|order {order}]
  [make|can you make] that whole beans [rather than|not] ground, order {order}[, it has not gone out yet|]
  [edit|change] my [order|basket] [of {day}|from this morning]: [one more|one less] {thing}, please
  the order is [placed|paid] but I want to [change|adjust] the [quantity|grind|size] [of {coffee}|]
  is there a way to [edit|amend] an order that is [already paid|not yet packed]? [I picked the wrong grind|]
return_item: 1.1: the grinder I sent back
  I [want|would like] to [return|send back] the {machine}[, it is too loud|, it does not fit|, never used it|]
  how do I [get|print] a returns [label|form] for [the|a] {thing}?
  [what is|how long is] your return [policy|period]? the {machine} [is not for me|was a gift I do not need]
  can I [bring back|give back|return] [an unopened|a sealed] {thing} [and get my money|]?
  the {machine} is [bigger|smaller|heavier] than [I thought|in the picture], I would rather [send it back|return it]
  [where|to which address] do I send [the|a] {machine} that I do not want to keep?
  [is the postage free|who pays the postage] when I [send something back|return a {thing}]?
  I am not happy with the {machine}, nothing wrong with it, but [it has to go back|take it back please]
refund_status: 1.1: my refund
  [where is|when will I get|I am waiting for] my refund [for the {machine}|of {amount}|]?
  you [got|received] my [return|parcel] {ago} [and|but] the money is [not back|not in my account] [yet|]
  [how long|how many days] [does|until] a refund [take|reach my bank|show up]?
  I was [told|promised] {amount} back {ago}, [nothing has come|my bank sees nothing]
  the [refund|money back] [is still pending|has not appeared], you said {n} days
  only [part|half] of my [refund|money] [came|was paid back], [where is the rest|{amount} is missing]
  [can you check|please confirm] [whether|that] you have [sent|paid out] the {amount} you owe me
  the order was cancelled {ago} and I [have not had|am still without] my {amount}
double_charge: 1.0: a payment taken twice
  I [was|have been] [charged|billed] twice for [the same|one] [order|box]
  [there are two|I see two] [payments|charges] of {amount} on my [statement|card], only one is right
  you [took|have taken] {amount} [two times|once {day} and again the day after]
  why did [my bank|the card] show {amount} twice? [order {order}|I only bought one {thing}]
  [duplicate|double] [payment|charge] for [order {order}|my {thing}], please give one back
  the [site|page] [froze|hung], I paid again and now [both|two] payments [went through|are gone]
  one box, two [debits|bookings] of {amount}, [that cannot be right|please check]
  my subscription [came off|was taken from] my account [two times|twice] [this month|{day}]
payment_declined: 1.1: a failed payment
  my [card|payment] [was|keeps being|is] [declined|refused|rejected] [at the checkout|although there is money on it|]
  [I cannot|unable to] pay: [the page says error|it says try another card] [every time|]
  the checkout [will not take|does not accept] my card [and my bank says all is fine|]
  [payment|the transaction] [failed|did not go through] [{n} times|again] [when I bought {coffee}|]
  tried to [buy|order] a {thing}, the [last step|payment page] [says no|shows an error|stops], my bank did not block it
  [why can't I pay|what is wrong with the payment], it [bounced|failed] with [both cards|two cards]
  your [email|message] says the payment for my box did not work, [the card is valid|I have enough money]
  [after I type the code|at the bank's code] the payment [breaks off|gets cancelled] and nothing is ordered
update_card: 1.0: my new bank card
  my [card|bank card] [expires|runs out] [soon|next month], how do I [enter|add] the new [one|number]?
  I [have|got] a new [bank|credit card], please [charge|use] [that|it] for my [subscription|boxes] from now on
  [where|how] can I [change|replace|update] the card [you have on file|for my subscription|on my account]?
  [I lost my card|My card was stolen] and have [another|a new] one, [what do I do|where do I put it in]?
  want to [switch|move] from [card to direct debit|my card to my {person}'s] for the [monthly|next] box
  please remove [my old|the expired] card and [take|save] [the new one|another]
  the [last four digits|expiry date] of [my|the saved] card [have|has] changed[, where do I edit it|]
  [can I|how do I] pay for my subscription with [a different|another] card {soon}?
discount_code: 1.1: a voucher code
  [my|the] [discount|promo|voucher] code [does not work|is not accepted|says invalid]
  I [forgot|was not able] to [enter|use] my [code|voucher] on order {order}, can you [still|] take it off?
  the [newsletter|leaflet|email] [promised|said] {n}0 percent off and the [basket|total] shows full price
  [where|in which box] do I [type|put] the [coupon|code] from [the newsletter|my {person}]?
  can I [use|combine] two [vouchers|codes] [on|in] one order?
  is there [a|any] [student|first order|loyalty] discount [at the moment|]?
  the code [FINCH|LARK|BREW]{n}0 [has expired|gives an error|was refused], it [should be|is] valid until {day}
  [a friend|my {person}] recommended you, how do we [both|] get the [money off|reduction]?
request_invoice: 0.9: an invoice
  [can|could] you [send|email] me [an|the] invoice [for|of] [order {order}|last month|the {machine}]?
  I need a [receipt|bill] with [VAT|the company name|our address] [for my taxes|for the accountant|for my boss]
  where do I [find|download] [my|the] [invoices|receipts] [of last year|]?
  [our|the] accounting [needs|asks for] [a proper|an] invoice [over {amount}|in the name of our {business}]
  the receipt [has the wrong name|lacks the VAT number], please [issue|send] a [corrected|new] [one|invoice]
  I [claim|expense] the coffee [at work|through my firm] and [need|want] [paperwork|a PDF] for {amount}
  no [bill|invoice|receipt] was [in the box|attached], I have to [show|hand in] one
  please put [our VAT number|the order reference] on the [bill|invoice] [from now on|for order {order}]
pause_subscription: 1.0: a break from the boxes
  [please pause|I want to pause|can I pause] my [subscription|boxes] [for {n} weeks|until {soon}|], {reason}
  [skip|please skip] [the next|one] [box|delivery], {reason}
  {reason}, [could you hold|please hold] [my|the] [coffee|deliveries] [for a month|until I am back|for a bit]
  I do not need [a|the] box [this|next] month, but [carry on|start again] after [that|it]
  how do I [put|set] my [subscription|plan] on hold [over the summer|while we travel|for a while]?
  [we have|I have] too much coffee [at home|left], [take a break|stop] for {n} weeks [and then go on|]
  is it possible to [freeze|suspend] the subscription [for a time|temporarily]? {reason}
  no [boxes|deliveries] in [July|August|December] please, [the rest of the year as usual|then as before]
cancel_subscription: 1.2: ending a subscription
  I [want|would like|need] to [cancel|end|stop] my subscription [for good|completely|], {reason}
  please [end|terminate|cancel] [my|the] [coffee plan|subscription] [after this box|right away|], {reason}
  how [do|can] I [unsubscribe from|get out of|leave] the [monthly|weekly] [boxes|plan]? I will not continue
  [no more|stop sending me] boxes, [I am done with it|it is over], {reason}
  do not renew my [plan|subscription] {soon}, I am [switching to tea|buying locally now]
  [the|your] price went up, so [cancel|end] my [plan|boxes] [please|for good]
  what is the notice period [to quit|for leaving] the subscription? {reason}
  I [thought I had|already] cancelled the [monthly box|subscription], [yet another came|it still runs], end it now
delivery_frequency: 1.0: how often the boxes come
  [can I get|I would like] my box every {n} weeks [instead of|rather than] [every week|monthly]
  [the coffee|it] [runs out too fast|does not last], [send|deliver] it more often please
  change my [plan|subscription] [from weekly to monthly|from monthly to every two weeks|to once a fortnight]
  a box [a|every] week is too [much|often], [make it|let us do] every {n} weeks
  how do I [set|choose] [how often|the rhythm at which] [the boxes come|you deliver]?
  we drink [more|less] now, could the [gap|time] between two boxes be [shorter|longer]?
  [please deliver|I want it] [twice|once] a month [from now on|], not [weekly|every ten days]
  what [intervals|rhythms] can I [pick|choose] for [the|my] subscription? [weekly is too often|monthly is not enough]
swap_coffee: 1.0: trying another roast
  [can I|I want to] [swap|exchange|switch] {coffee} for {coffee} in my [next box|subscription]
  [I am|we are] bored of {coffee}, [put|send] {coffee} in [the next box|from now on]
  my subscription [has|is set to] {coffee} but I [would prefer|like] [something darker|something lighter|a decaf]
  [how|where] do I [choose|pick] [another|a different] [roast|coffee] for my [plan|monthly box]?
  [next time|in the next delivery] [decaf|beans from Ethiopia|a dark roast] [please|would be nice] instead of {coffee}
  please change [the|my] [grind|beans] in the subscription to [whole beans|espresso grind|filter grind]
  is it possible to get a different [coffee|roast] every [month|time] [rather than {coffee} always|]?
  {coffee} is too [strong|dark|fruity] for my {person}, [let us have|change the plan to] {coffee}
stale_coffee: 1.0: beans that were past their best
  the {coffee} [I got|in my last box] tastes [stale|flat|like cardboard|old]
  [the roast date|the date on the bag] is {n} months [ago|old], [that is not fresh|I expected fresh beans]
  these beans [smell of nothing|are dry and dull|have no aroma][, were they roasted last year|]
  [very disappointed|not impressed] with [the quality|the taste] of {coffee}, it was better before
  the bag of {coffee} [was past its date|had expired] when it [came|arrived]
  {coffee} used to be [great|wonderful], this [bag|batch] is [lifeless|rancid|oily and old]
  I found [a stone|a mouldy smell|burnt beans] in [the|my] {coffee}
  how [fresh|old] are the beans you send? [mine taste|the last ones tasted] [dusty|flat]
brewing_advice: 1.0: brewing tips
  how [much|many grams of] coffee do I [use|need] for {brewer}?
  my coffee [tastes|comes out] {trouble} with {brewer}, what am I doing wrong?
  [what grind|which grind size] [is best|do you recommend] for {brewer}?
  how [hot|long] should the [water be|coffee steep] [for {coffee}|in {brewer}]?
  [any tips|do you have a recipe] for {coffee} in {brewer}?
  I am new to [this|{brewer}], how do I make [a good cup|it less {trouble}]?
  [which|what] [water|ratio] [would you use|works] for {brewer} [with {coffee}|]?
  every cup [of {coffee}|] is {trouble}, [should I|do I have to] grind [finer|coarser]?
allergy_question: 0.9: allergens
  [does|do] {coffee} contain [any|traces of] {allergen}?
  my {person} [is allergic to|cannot have|reacts to] {allergen}, is {coffee} safe?
  is [your coffee|the descaler|the chocolate in the tasting set] free of {allergen}?
  what is in [the flavoured coffee|the tasting set|{coffee}]? I [must avoid|cannot eat] {allergen}
  do you [roast|pack] on machines that [touch|handle] {allergen}?
  is the [oat powder|syrup|tasting set] [vegan|suitable for a diet without {allergen}]?
  how much [caffeine|{allergen}] is [left|there] in {coffee}? I [am pregnant|have a heart condition]
  where can I read the [full ingredients|list of allergens] of [the tasting set|{coffee}]?
machine_fault: 1.1: a machine that broke
  my {machine} [stopped working|does not turn on|died] [after {n} weeks|this morning|]
  the {machine} [leaks|makes a terrible noise|smells burnt|gets stuck] [whenever I use it|since {day}]
  [bought|got] the {machine} {ago} and it [is already broken|no longer grinds|will not heat up]
  [the light on|the motor of] the {machine} [blinks red|hums but nothing moves], is it under guarantee?
  [can you repair|do you fix] a {machine} [that keeps switching off|which is dead]?
  the {machine} [trips the fuse|gives a weak stream|jams] and [cleaning|descaling] did not help
  is there a warranty on the {machine}? [mine|it] [gave up|broke down] {day}
  after {n} months the {machine} [only rattles|shows an error|drips from below]
spare_part: 0.9: a replacement part
  [where can I buy|I need|I am after] a [new|spare|replacement] {part} for [my|the] {machine}
  I [dropped|lost|melted] the {part} of my {machine}, can I [order|buy] [just that|one]?
  which {part} fits the [old|small|2019] {machine}?
  is the {part} [of|for] the {machine} [available|in stock] [separately|on its own]?
  the {machine} is fine, [only the|but the] {part} [is worn|has worn out], [how much is|do you have] a new one?
  [looking for|in search of] a {part} and a {part} for the {machine}, [cannot find them|are they] in your shop
  my {person} threw away the {part} [by mistake|], [what does another cost|can you post me one]?
  [what size|which model] of {part} does the {machine} [take|need]? I want to [order|buy] two
login_problem: 1.1: my password
  I [cannot|can't|am unable to] [log in|sign in|get into my account] [any more|since {day}|]
  [forgot|I have forgotten] my password and the [reset|] email [never comes|does not arrive|is not in spam]
  [it says|the site says] wrong password, [but it is right|I changed it {ago}]
  my account is [locked|blocked] [after {n} attempts|for no reason]
  the [code|link] for [signing in|a new password] [has expired|is refused|never arrives]
  [no access to|I lost] the [phone|mailbox] that you send the [login|sign in] code to
  every time I [type|enter] my [details|email], the page [reloads|logs me out|goes blank]
  you say there is no account with my [email|address], [yet I order every month|but I made one {ago}]
close_account: 0.9: deleting my data
  please [delete|close|remove] my account [and all my data|completely|]
  I want [you to erase|to have] [all my|my personal] [data|details] [deleted|removed][, as is my right|]
  how [do I|can I] [get rid of|close] my [profile|customer account]? I [will not order again|have another one]
  [I have|there are] two accounts [by accident|], [close|delete] the one with the [old|other] email
  my {person} [has died|moved away], [please close|what do I do to close] the account
  [take|remove] me from your [system|database] [for good|entirely], [no emails, no profile|I do not want an account]
  is there a [button|way] to [delete|wipe] [an|my] account? [I cannot find it|]
  I no longer [use|want] my login with you, [erase everything|delete what you store about me]
gift_order: 1.0: a present for somebody
  I [want|would like] to [send|give] [a box|{coffee}|a subscription] to my {person} as a [gift|present]
  can you [wrap|gift wrap] the {thing} and [add|put in] a card [with a message|]?
  [is it possible to|can I] [leave out|hide] the price [in the box|on the slip]? it is for my {person}
  do you have [gift cards|vouchers to give away|a nice set for a birthday] [of about {amount}|]?
  my {person} [loves|lives on] coffee, [what would you give|which box makes a good present]?
  [should|could] the [present|gift box] [arrive|get there] on {day} exactly, it is for a [birthday|wedding]
  how [long|many months] does a gift subscription [run|last], and who [gets|sees] the emails?
  I bought [a gift card|a present] for my {person} and the [email|card] [never reached them|has the wrong name]
wholesale_enquiry: 0.9: supplying our office
  [we run|I own] a {business} in {city} and [want|would like] to [serve|buy] your coffee [in bulk|every week]
  do you [supply|sell to|work with] [businesses|a {business} like ours]? we need about {n}0 kilos a month
  what are your [trade|wholesale] prices for [{coffee}|{n}0 kilos]?
  [could|can] we [stock|sell] {coffee} in our {business}?
  [our|the] {business} [opens|starts] {soon} and looks for a [roaster|supplier], who do I talk to?
  is there a [price list|minimum order] for [companies|a {business}]?
  we are {n}0 people in [an office|a {business}] and [go through|drink] a lot, [can we have an account|any bulk deal]?
  [can you train our staff|do you lend machines] if our {business} takes {n}0 kilos [a month|]?
shipping_abroad: 0.9: postage to other countries
  do you [ship|deliver|send] to {country}?
  how much [is|would be] [postage|shipping] to {country} [for {n} bags|]?
  I [live|will spend the winter] in {country}, can I [still|] [order|get your coffee]?
  [are there|do I pay] [customs|import duty|extra taxes] when [you post|a box goes] to {country}?
  my {person} [lives|studies] in {country}, [is delivery there possible|what would it cost to post a {thing} there]?
  how [long|many days] does a parcel [to|for] {country} [take|need]?
  the checkout does not [list|offer] {country}, [do you not deliver there|can you make an exception]?
  which countries [outside the UK|in Europe|overseas] do you [send|ship] coffee to?
""")


# The bundled corpus: customer requests with their intent, and related plain text without any label.
#
#     python -m ratchet.data.bundled_corpus data      # writes data/raw/support.csv, data/raw/support.jsonl,
# data/text/help.txt
#
# Everything is invented and drawn from phrase tables by seeded generators: the same code writes the same bytes on
# every
# machine (they use nothing but `Random.random`, whose sequence Python promises to keep). The two outputs share words
# but
# no sentences: a label stands beside a request in `raw`, and `text` holds no request at all.
#
# The task is meant to be learnable but not trivial: a third of the requests mention another intent in passing, some
# have
# typing errors, and intents share their vocabulary.

CSV_ROWS, JSONL_ROWS, TEXT_LINES = 2400, 1800, 2000
CHANNELS = ("email", "chat", "web form", "phone note")

GREETINGS = parse_entries("""
[Hi|Hello|Hey|Good morning|Good afternoon|Dear team|Hi there|Hello again][,|!]
To whom it may concern,
[Quick question|Question for you|Me again|Sorry to bother you][:|,|.]
""")

CONTEXTS = parse_entries("""
I have been [buying from you|a customer|ordering here] [for years|since last spring|for about {n} months].
[Order|Order number|Ref|It is about order] {order}.
I [love|really like|enjoy] {coffee} [and have told everybody|by the way].
[Writing|This is] [on behalf of|for] my {person}, who does not [do email|like computers].
I am [in|writing from] {city}.
[I tried to phone|I tried the chat|I rang twice] but [nobody answered|the line was busy|got cut off].
We are [a family of {n}|two heavy coffee drinkers|a small household].
I could not find [this|an answer] on your [site|help pages].
""")

ASIDES = parse_entries("""
[This is not about|It has nothing to do with|Please ignore my earlier message about|I am not asking about] {aside}.
[Thanks for sorting out|Thank you for your quick help with|You were great with] {aside} [last time|last month|in May].
[My {person}|A friend of mine] [wrote|has already written|called] [to you|] about {aside}[, mine is a different
    matter|].
[First|Last month|A while ago|In spring] [it was|there was] {aside}[, and now this|. Today it is something else].
[We can talk about|I will come back to|Leave aside] {aside} [another time|later|some other day].
[The matter of|The question of|That thing with] {aside} [is settled|has been dealt with|turned out fine][, thanks|].
""")

CLOSINGS = parse_entries("""
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
        for entry in parse_entries("""
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

EVERYDAY = parse_entries("""
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

NOTES = parse_entries("""
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


class SentenceWriter:
    """Turns templates into sentences. One writer is one sequence of random choices."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed).random

    def chance(self, probability: float) -> bool:
        return self._random() < probability

    def pick(self, items: Sequence[_T]) -> _T:
        return items[int(self._random() * len(items))]

    def pick_weighted(self, items: Sequence[CustomerIntent]) -> CustomerIntent:
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
    writer, seen = SentenceWriter(seed=7), set[str]()
    rows: list[dict[str, str]] = []
    while len(rows) < CSV_ROWS + JSONL_ROWS:
        intent = writer.pick_weighted(INTENTS)
        request = _write_request(writer, intent)
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


def _write_request(writer: SentenceWriter, intent: CustomerIntent) -> str:
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
    return _add_typos(writer, " ".join(_capitalize(part) for part in (*before, ask, *after)))


def _capitalize(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _add_typos(writer: SentenceWriter, text: str) -> str:
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
    writer, seen = SentenceWriter(seed=11), set[str]()
    lines: list[str] = []
    while len(lines) < TEXT_LINES:
        line = _write_page(writer) if writer.chance(0.4) else _write_paragraph(writer)
        if line not in seen:
            seen.add(line)
            lines.append(line)
    text_dir.mkdir(parents=True, exist_ok=True)
    (text_dir / "help.txt").write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")


def _write_page(writer: SentenceWriter) -> str:
    names = list(ARTICLES)
    name = writer.pick(names)
    first, second = (_capitalize(writer.say(sentence)) for sentence in ARTICLES[name])
    title = _capitalize(name.replace("_", " "))
    links = f"See also {writer.pick(names)} and {writer.pick(names)}."
    return writer.pick(
        (f"{title}. {first} {second}", f"{second} {first} {links}", f"{title}: {first}", f"{second} {links}")
    )


def _write_paragraph(writer: SentenceWriter) -> str:
    tables = (EVERYDAY, EVERYDAY, EVERYDAY, NOTES)
    return " ".join(_capitalize(writer.say(writer.pick(writer.pick(tables)))) for _ in range(writer.pick((1, 2, 2, 3))))


def main(arguments: Sequence[str]) -> None:
    """Write everything below the directory that is named."""
    if len(arguments) != 1:
        sys.exit("usage: python -m ratchet.data.bundled_corpus DATA_DIR")
    data = Path(arguments[0])
    write_requests(data / "raw")
    write_text(data / "text")


if __name__ == "__main__":
    main(sys.argv[1:])
