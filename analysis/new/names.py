"""What the names of columns say. A name is without spaces around it and without RecBole's type; its words are those of
`user_id`, `userId` and `C14` (c, 14).
"""

ID = r"(?i:.*ids?\W*)"
NO_ID = r"(?i:(|.*[_\W])(un|pre|in)?(bid|paid|valid|void|aid|kid|solid|liquid|fluid|acid|covid)s?)"
ROW = r"(?i:id|row|index|idx|uuid|guid|(request|impression|event|sample|row|log|record|instance)_?id)"
INDEX = r"|Unnamed: \d+|__index_level_\d+__"  # that pandas writes
CODE = r"(?i:C\d+|\d+|(cat|sparse|categorical)_?\d+)"
MEASURE = r"(?i:(I|int|dense|num|numerical|numeric|float|cont|continuous)_?\d+)"
TIME = r"(?i:.*(time|date|epoch|stamp|datetime)|(.*[_\W])?(ts|at|dt|day|hour|created|updated))"

# a whole word: the last one that is no number
CODE_WORD = (
    r"cat|category|categorical|code|type|class|segment|group|level|brand|customer|user|item|product|sku|gender|sex|job"
    r"|occupation|zip|zipcode|postal|postcode|city|country|region|state|province|device|os|browser|channel|campaign|ad"
    r"|advertiser|adgroup|pos|position|site|domain|app|shop|store|seller|vendor|slot|tag|genre|key|hash|version|status|model"
    r"|publisher|author|artist|album|visitor|session|network|carrier|biz|business|merchant|movie|film|song|track|video"
    r"|article|news|book|hotel|query|topic"
)
MEASURE_WORD = (
    r"counts?|cnt|num|number|qty|quantity|amount|amt|prices?|cost|fee|fare|tax|income|salary|wage|revenue|sales|stock"
    r"|balance|budget|gains?|loss|losses|dividends|age|years?|yr|duration|dur|length|len|size|width|height|weight"
    r"|distance|dist|depth|area|rate|ratio|pct|percent|percentage|avg|average|mean|sum|total|min|max|std|rating|score"
    r"|points|days|hours|minutes|seconds|secs|ms|weeks|months|dwell|views|clicks|visits|likes|shares|followers|lat|lon"
    r"|latitude|longitude|temperature|probability|prob|popularity|bytes|time|elapsed|delay"
)
FIRST_OF_MEASURE = r"n|num|nb|nr|number|count|cnt|total|sum|avg|mean|max|min|log|std"  # the first word
SECOND_LABEL = (  # any word
    r"click|clicked|clk|purchased?|conversion|converted|conv|cvr|buy|bought|order|ordered|pay|payment|liked?"
    r"|follow|followed|shared?|cart|install|installed|labels?"
    r"|(?!(un)?(married|divorced|widowed|separated|employed|retired|verified|registered|subscribed|enabled|rated)$)[a-z]+ed"
)

# whole numbers that are dates; whether only a name of a time makes them so
MMDD, HH = r"(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])", r"([01]\d|2[0-3])"
CLOCKS = (
    ("a date, YYYYMMDD", rf"(19|20)\d\d{MMDD}", False),
    ("a time, YYMMDDHH", rf"[0-4]\d{MMDD}{HH}", False),
    ("a time, YYYYMMDDHH", rf"(19|20)\d\d{MMDD}{HH}([0-5]\d){{0,2}}", False),
    ("a date, YYMMDD", rf"[0-4]\d{MMDD}", True),
    ("a month, YYYYMM", r"(19|20)\d\d(0[1-9]|1[0-2])", True),
    ("seconds since 1970", r"[1-9]\d{8,9}(\.\d+)?", True),
    ("milliseconds since 1970", r"[1-9]\d{11,12}(\.\d+)?", True),
    ("microseconds or nanoseconds since 1970", r"[1-9]\d{14,18}", True),
    ("serial days of a spreadsheet", r"[2-6]\d{4}(\.\d+)?", True),
)
