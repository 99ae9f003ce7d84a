"""Table I of the ECLIP paper: lane switches per request, summed over the workers of a mix."""

TABLE_I = {
    "paper/1": {"KW-IOCTL": 1319, "KW-prealloc": 413, "ECLIP": 42},
    "paper/2": {"KW-IOCTL": 1015, "KW-prealloc": 755, "ECLIP": 23},
    "paper/3": {"KW-IOCTL": 1077, "KW-prealloc": 538, "ECLIP": 28},
    "paper/4": {"KW-IOCTL": 613, "KW-prealloc": 330, "ECLIP": 10},
    "paper/5": {"KW-IOCTL": 728, "KW-prealloc": 166, "ECLIP": 12},
    "paper/6": {"KW-IOCTL": 1422, "KW-prealloc": 695, "ECLIP": 20},
    "paper/7": {"KW-IOCTL": 102, "KW-prealloc": 72, "ECLIP": 30},
}
