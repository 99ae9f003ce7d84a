/* libeclip's public interface, for C and C++.
 *
 * `eclip exec` preloads libeclip, so a program links with nothing. Without libeclip the functions are
 * null: `if (eclip_request) eclip_request(-1);`. From other languages, look them up by name in the
 * process: `ctypes.CDLL(None).eclip_request(-1)`. Every function may be called from any thread, at any
 * time, and does nothing where libeclip is switched off.
 */
#ifndef ECLIP_H
#define ECLIP_H

#ifndef ECLIP_OPTIONAL
#define ECLIP_OPTIONAL __attribute__((weak))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* A request of a plan's worker begins with this thread's next launch. `worker` is the worker's number
 * in the plan, or -1: libeclip finds it. Needs `eclip exec --plan`. */
ECLIP_OPTIONAL void eclip_request(int worker);

/* Ask for a cap of so many SMs (on AMD, CUs) instead of the one that the process has. A thread of
 * libeclip does the rest. 0: asked; -1: the process has no cap, or there is no such number. Needs
 * `eclip exec --sms` or `--share`. */
ECLIP_OPTIONAL int eclip_sms(int wanted);

/* The SMs that the process holds now; 0: it has no cap. */
ECLIP_OPTIONAL int eclip_sms_held(void);

#ifdef __cplusplus
}
#endif
#endif
