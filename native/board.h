/* The board: a small mapped file on which workers of all processes say how they are.
 *
 * Plain C, for the driving loop and libeclip alike. src/eclip/gpu/board.py makes and opens
 * the file, src/eclip/core/rules.py has the words and core/decide.py the rules;
 * tests/unit/gpu/test_board.py compares both with this file, word by word.
 *
 * The file is one header and ECLIP_BOARD_ROWS rows. Of a row, what others decide by is the first
 * two cache lines; the others are for people. Integers are the machine's
 * own. Who opens it checks owner, mode, size and the header before mapping it, and refuses another
 * version. It is put in place by link(), never renamed over, truncated or removed; space is taken by
 * posix_fallocate() before it is mapped, because writing to a page that a full tmpfs cannot give is
 * SIGBUS.
 *
 * An owner holds an OFD lock (F_OFD_SETLK, F_WRLCK) on the bytes of its row, and writes no other
 * row. A row whose lock is free is nobody's, whatever its words say: who claims it clears it first.
 * Locks are inherited by fork(): a child closes its copy of the descriptor and never unlocks.
 * Readers ask for no lock. Words are read and written one by one, aligned, and need not agree with
 * each other. */
#ifndef ECLIP_BOARD_H
#define ECLIP_BOARD_H

#include <stdint.h>

#define ECLIP_BOARD_MAGIC INT64_C(0x64726270696c6365) /* "eclipbrd" */

enum {
    ECLIP_BOARD_VERSION = 3,
    ECLIP_BOARD_ROWS = 256,
    ECLIP_BOARD_WORDS = 64, /* of a row: eight cache lines */
    ECLIP_BOARD_NAME_BYTES = 64,
    ECLIP_SLICE_WORDS = 4,
};

/* Tiers. Plain ones neither give way nor are given way to: they have slices of their own. */
enum { ECLIP_NOBODY = 0, ECLIP_SERVICE = 1, ECLIP_BACKGROUND = 2, ECLIP_PLAIN = 3 };

/* In busy_since; times may be negative. */
#define ECLIP_IDLE (-(INT64_C(1) << 62))
/* A heartbeat of an owner that cannot stop without its readers; only in memory of one process. */
#define ECLIP_ALWAYS (INT64_C(1) << 62)
/* A row counts as idle once its heartbeat is older than this, ... */
#define ECLIP_STOPPED_NS INT64_C(100000000)
/* ... or once it has been busy for so many times its bound. */
#define ECLIP_HUNG_BOUNDS 10
/* How often one request of a service lets another go first. */
#define ECLIP_MOST_OVERTAKEN 2

/* All times are nanoseconds of CLOCK_MONOTONIC. A row of zeros belongs to nobody. */
struct eclip_board_row {
    int64_t tier;       /* written last by who claims the row, cleared first by who leaves it */
    int64_t busy_since; /* when its oldest request was accepted, or ECLIP_IDLE */
    int64_t deadline;   /* of its most urgent request; of background of a session: from when on it
                           is owed its floor. libeclip's background does not say */
    int64_t left_ns;    /* that this request should still need, with those before it */
    int64_t heartbeat;  /* when its owner was last seen to run: at least every 20 ms */
    int64_t bound_ns;   /* of a service's requests; 0 for background */
    int64_t some_ns;    /* less slack than this (deadline - left_ns - now) is not plenty, */
    int64_t none_ns;    /* and less than this is none */

    int64_t strict;       /* why background launches nothing beside it; 0: it may */
    int64_t latest;       /* from then on one of its requests cannot be in time any more */
    int64_t account;      /* the row that holds the account: its own, or of another replica */
    int64_t credit;       /* in millionths of a late request; this and the following of the account */
    int64_t gain;         /* for each request in time; 0: no account */
    int64_t lock;         /* 1 while a thread of its owner changes the account */
    int64_t strict_since; /* in this busy period */
    int64_t draw;         /* state of the random choice of audits */

    int64_t counted;      /* requests that have ended or expired, as the following to free_late */
    int64_t late;
    int64_t lost;         /* late without credit, in busy periods that began free */
    int64_t late_strict;  /* late without credit, in busy periods that began strict */
    int64_t late_host;    /* in time but for what the host lost before their start */
    int64_t audited;      /* of busy periods that were strict by chance */
    int64_t audited_late;
    int64_t free;         /* of busy periods that began free */
    int64_t free_late;
    int64_t strict_ns[3]; /* busy and strict, by reason */
    int64_t move_ns;  /* how long the last change of units took until launches went there, */
    int64_t leave_ns; /* and until the last kernel on the units before had ended */
    int64_t spare[2];

    int64_t pid;              /* as its owner sees itself: shown, never trusted */
    int64_t served;           /* requests, as the following since the row was claimed */
    int64_t launched;         /* stretches */
    int64_t yielded;          /* times that it stopped at a joint */
    int64_t moved;            /* stretches taken on another lane than planned */
    int64_t crossed;          /* barriers between lanes */
    int64_t longest_pause_ns; /* at a joint */
    int64_t tail_ns;          /* about the p99 of its requests */

    int64_t units_wanted; /* by the process; 0: all */
    int64_t units_held;
    int64_t slices_held[ECLIP_SLICE_WORDS]; /* bit sets of slices */
    int64_t slices_wanted[ECLIP_SLICE_WORDS];
    int64_t changes;     /* of what it holds, that are done */
    int64_t memory_cap;  /* bytes that it may allocate; 0: no cap */
    int64_t memory_used; /* bytes */
    int64_t begun;       /* requests that the process has marked, as the following */
    int64_t ended;
    int64_t asked;       /* units that somebody asks the owner for, above a count of 32 bits: the one
                            word that others of the user write, too */

    char name[ECLIP_BOARD_NAME_BYTES]; /* for people, filled with zeros; UTF-8 that may be cut */
};

struct eclip_board {
    int64_t magic;
    int64_t version;
    int64_t rows;
    int64_t words;
    int64_t reserved[60]; /* 0 */
    struct eclip_board_row row[ECLIP_BOARD_ROWS];
};

#endif
