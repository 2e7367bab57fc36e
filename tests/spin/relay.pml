/* Iterations that a GPU and the CPU share: who waits for whom, and whether that always ends.

   A model for `spin`, which tries every order in which the parties can go on. test_relay_model.py says with
   which sizes and faults; the model says nothing of time: patience may end at any moment, so "late" and
   "never" are both covered.

   here                      in the code
   ------------------------  ------------------------------------------------------------------------------
   Launcher                  a CUDA graph's launch (engine/execute/backend.py, StreamBackend.start): puts
                             the nodes into the GPU's queues, in any order that the graph's edges allow
   Queue                     one hardware queue: finite, in order; its first node holds up all behind it
   may_follow                the edges: order of each lane, and marks (engine/execute/program.py)
   Executor                  ModelRunner (engine/execute/model_runner.py): start, _submit, wait, _attempt, _end, close
   Closer                    another thread that calls ModelRunner.close in the middle of the work
   Server, serve             Relay::work, Relay::serve and Relay::step (native/src/relay.cpp)
   Guard                     Relay::guard; one look without progress is enough here, which covers any number
   doing, goes_on            Relay::doing_ and goes_on
   start, finish, cancel     Relay::start, finish, cancel; release_all likewise
   close                     Relay::close, which waits for the server for a time only; that may be over at
                             any moment, too
   mutex, changed,           Relay::mutex_ and its two condition variables; wake-ups that nobody asked for do
     guard_changed           not happen here, since they would hide those that are lost
   ready, done               flags[READY] and flags[DONE], each with the iteration that raised it
   *_of                      what a piece of memory holds: iteration, layer and sub-batch; 0: half written

   The steps here are attention's. Transfers of KV (RowsTask) are carried out by the same code with the same
   two flags, in an order that is as fixed, by a relay of their own; so the model is not said again for them. What
   it shows to be needed holds for them, too (NO_DESCENT): whatever waits for a flag of the relay has to come
   after all raises that the relay sees before it raises that flag, in its order. Of transfers these include
   those of the layer before (behind) and of the layer after (ahead).

   Checked in every order:
   - everybody ends (no deadlock, no lost wake-up; the test also looks for circles without progress);
   - no flag of one iteration is taken for another's;
   - the CPU attends to what arrived for that layer and sub-batch, the GPU reads outputs that were written,
     and nobody writes memory that is still read;
   - an iteration that was not done right is never told as done;
   - once an iteration is left, its attention writes no KV any more: the blocks may be somebody else's.

   Faults of the world (each may happen or not, at any step): LAUNCH_FAILS (with some of the nodes on their
   way, as when a program runs at once and memory ends), STEP_FAILS, RAISE_LOST (the GPU's flag does not
   arrive), CPU_LATE, CPU_STOPS, CLOSES.
   Faults of the code, to show that they are found: NO_DESCENT (a wait that the GPU may put before its raise),
   GUARD_FORGETS (to raise the flags), GUARD_SLEEPS (nobody wakes it), CANCEL_FORGETS_DEVICE,
   CANCEL_FORGETS_RELAY, FLAGS_STAY (from the iteration before), NOT_SETTLED (what is under way is not waited
   for), DECIDES_LATE (the server may begin a step after the guard gave the iteration up), LEAVES_LATE (the
   engine goes on although close found the server in a step). */

#ifndef LAYERS
#define LAYERS 2
#endif
#ifndef SUBS
#define SUBS 2
#endif
#ifndef QUEUES
#define QUEUES 1
#endif
#ifndef ROOM
#define ROOM 2 /* nodes in a queue */
#endif
#ifndef ITERATIONS
#define ITERATIONS 2
#endif

#if defined(RAISE_LOST) || defined(CPU_LATE) || defined(CPU_STOPS)
#define PATIENCE /* ends at any moment */
#endif

#define STEPS (LAYERS * SUBS) /* step j is layer j / SUBS of sub-batch j % SUBS */
#define STAMP(step) (iteration * STEPS + (step) + 1)

/* Lanes. DEVICE: linear of each step, then the end of each sub-batch. TO_HOST: q, k, v and the raise of each
   step. TO_DEVICE: the wait and the output of each step. Lanes are in order, so counts say what was done. */
#define DEVICE 0
#define TO_HOST 1
#define TO_DEVICE 2
#define CODE(lane, index) ((lane) * 32 + (index))

byte length[3];
byte placed[3]; /* nodes of each lane that are in a queue or done */
byte ended[3];
chan queue[QUEUES] = [ROOM] of { byte };
bool launching;

byte iteration; /* the executor's; 1, 2, .. */
byte ready[STEPS], done[STEPS];
byte device_qkv_of[SUBS], host_qkv_of[SUBS], host_output_of[SUBS], device_output_of[SUBS];
bool spoilt;   /* something of this iteration was computed from what was not there */
bool released; /* flags of this iteration were raised without their work */

#define OUTPUT_CAME(index, counts) ((index) < SUBS || counts[TO_DEVICE] >= 2 * ((index) - SUBS) + 2)
#define LINEAR_ENDED(index, counts) ((index) % 2 == 1 || counts[DEVICE] >= (index) / 2 + 1)
#ifdef NO_DESCENT
#define RAISED(index, counts) true
#else
#define RAISED(index, counts) ((index) % 2 == 1 || counts[TO_HOST] >= (index) + 2)
#endif
#define OTHER_LANES(lane, index, counts) ((lane == DEVICE && OUTPUT_CAME(index, counts)) || (lane == TO_HOST && LINEAR_ENDED(index, counts)) || (lane == TO_DEVICE && RAISED(index, counts)))
#define may_follow(lane, index, counts) (counts[lane] == (index) && OTHER_LANES(lane, index, counts))
#define IDLE (placed[DEVICE] == ended[DEVICE] && placed[TO_HOST] == ended[TO_HOST] && placed[TO_DEVICE] == ended[TO_DEVICE])
#define ALL_ENDED (ended[DEVICE] == length[DEVICE] && ended[TO_HOST] == length[TO_HOST] && ended[TO_DEVICE] == length[TO_DEVICE])

/* Somebody reads memory that should hold the stamp. */
inline expect(memory, stamp) {
  if
  :: memory != stamp -> spoilt = true; assert(released)
  :: else
  fi
}

/* ---- the GPU ---- */

chan launch = [0] of { bool };

proctype Launcher() {
  byte lane, q;
  bool fails;
end:
  do
  :: launch?fails ->
    do
    :: atomic {
        if
        :: placed[DEVICE] < length[DEVICE] && may_follow(DEVICE, placed[DEVICE], placed) -> lane = DEVICE
        :: placed[TO_HOST] < length[TO_HOST] && may_follow(TO_HOST, placed[TO_HOST], placed) -> lane = TO_HOST
        :: placed[TO_DEVICE] < length[TO_DEVICE] && may_follow(TO_DEVICE, placed[TO_DEVICE], placed) ->
          lane = TO_DEVICE
        fi;
        q = 0;
        do
        :: q < QUEUES - 1 -> q++
        :: break
        od;
        nfull(queue[q]); /* waits for room */
        queue[q]!CODE(lane, placed[lane]);
        placed[lane]++;
        lane = 0;
        q = 0
      }
    :: placed[DEVICE] == length[DEVICE] && placed[TO_HOST] == length[TO_HOST] &&
       placed[TO_DEVICE] == length[TO_DEVICE] -> break
    :: fails -> break
    od;
    atomic { fails = false; launching = false }
  od
}

inline end_node() {
  queue[self]?_;
  ended[lane]++;
  half = false;
  lane = 0;
  index = 0;
  sub = 0
}

/* Copies take two steps, between which others go on; a linear stage takes one. */
proctype Queue(byte self) {
  byte lane, index, sub;
  bool half;
end:
  do
  :: atomic { !half && nempty(queue[self]) ->
      queue[self]?<lane>;
      index = lane % 32;
      lane = lane / 32;
      sub = (index / (lane == DEVICE -> 1 : 2)) % SUBS;
      may_follow(lane, index, ended);
      if
      :: lane == DEVICE ->
        if
        :: index >= SUBS -> expect(device_output_of[sub], STAMP(index - SUBS))
        :: else
        fi;
        if
        :: index < STEPS -> device_qkv_of[sub] = STAMP(index)
        :: else
        fi;
        end_node()
      :: lane == TO_HOST && index % 2 == 0 ->
        expect(device_qkv_of[sub], STAMP(index / 2));
        host_qkv_of[sub] = 0;
        half = true
      :: lane == TO_HOST && index % 2 == 1 ->
        if
        :: ready[index / 2] = iteration
#ifdef RAISE_LOST
        :: skip
#endif
        fi;
        end_node()
      :: lane == TO_DEVICE && index % 2 == 0 ->
        done[index / 2] != 0;
        assert(done[index / 2] == iteration);
        end_node()
      :: lane == TO_DEVICE && index % 2 == 1 ->
        expect(host_output_of[sub], STAMP(index / 2));
        device_output_of[sub] = 0;
        half = true
      fi
    }
  :: atomic { half ->
      if
      :: lane == TO_HOST ->
        expect(device_qkv_of[sub], STAMP(index / 2));
        host_qkv_of[sub] = STAMP(index / 2)
      :: else ->
        expect(host_output_of[sub], STAMP(index / 2));
        device_output_of[sub] = STAMP(index / 2)
      fi;
      end_node()
    }
  od
}

bool closed;    /* ModelRunner._is_closed */
bool gave_up;   /* ModelRunner._attempt: break_off() names a relay */
byte num_done;
byte left;      /* the last iteration whose blocks may be somebody else's by now */
bool closer_ended;

/* ---- the relay ---- */

bool mutex;
bool running, relay_closed, cancelled, failed, stalled;
bool server_ended;
bool executor_sleeps, server_sleeps, guard_sleeps;
bool progress; /* progress_ is not what the guard saw last */

mtype = { WAITING, ATTENDING, GIVEN_UP };
mtype doing = WAITING;
#ifdef DECIDES_LATE
#define GOES_ON true
#define IN_STEP (doing == ATTENDING)
#else
#define GOES_ON (doing != GIVEN_UP)
#define IN_STEP in_step
bool in_step; /* it was given up in a step */
#endif

/* guard_wakes_ns_: before the guard's first look, some time in the future, never */
mtype = { FIRST, SOON, NEVER };
mtype guard_wakes = FIRST;

#define lock() atomic { !mutex -> mutex = true }
#define unlock() mutex = false

inline notify_changed() { executor_sleeps = false; server_sleeps = false }

/* All at once: a GPU that is slow to look sees them one by one. */
inline release_all(i) {
  d_step {
    released = true;
    i = 0;
    do
    :: i < STEPS -> done[i] = iteration; i++
    :: else -> break
    od;
    i = 0
  }
}

inline cancel(i) {
  lock();
  if
  :: running ->
#ifndef CANCEL_FORGETS_RELAY
    cancelled = true;
#endif
#ifndef CANCEL_FORGETS_DEVICE
    release_all(i)
#else
    released = true
#endif
  :: else
  fi;
  unlock()
}

proctype Server() {
  byte step, i, own;

  do
  :: atomic {
      lock();
      do
      :: running || relay_closed -> break
      :: else ->
        unlock();
        server_sleeps = true;
        !server_sleeps;
        lock()
      od;
      unlock();
      if
      :: running -> own = iteration; step = 0
      :: else -> break
      fi
    };
    do
    :: step < STEPS ->
      if
      :: d_step { GOES_ON -> doing = WAITING }
      :: !GOES_ON -> break
      fi;
      progress = true;
      if
      :: atomic { ready[step] != 0 -> assert(ready[step] == iteration) }
      :: cancelled -> break
      fi;
      if
      :: atomic { GOES_ON ->
          doing = ATTENDING;
          progress = true;
          expect(host_qkv_of[step % SUBS], STAMP(step));
          host_output_of[step % SUBS] = 0
        }
      :: !GOES_ON -> break
      fi;
      if
      :: true
#ifdef CPU_STOPS
      :: true -> goto end_stopped
#endif
#ifdef STEP_FAILS
      :: true -> d_step { failed = true; release_all(i) }; break
#endif
      fi;
      d_step { assert(own > left); /* its KV goes to blocks that are still its own */
        expect(host_qkv_of[step % SUBS], STAMP(step)); host_output_of[step % SUBS] = STAMP(step) };
      d_step { done[step] = iteration; step++ }
    :: else -> break
    od;
    atomic { lock(); running = false; notify_changed(); unlock() }
  od;
  goto end_server;
end_stopped:
  false;
end_server:
  atomic { lock(); server_ended = true; notify_changed(); unlock() }
}

proctype Guard() {
  byte i;
  lock();
  do
  :: relay_closed -> break
  :: else ->
#ifdef PATIENCE
    if
    :: running && !stalled ->
      d_step { guard_wakes = SOON; guard_sleeps = true; unlock() };
      if
      :: !guard_sleeps; lock() /* somebody woke it */
      :: d_step { guard_sleeps -> guard_sleeps = false }; /* time has passed */
        lock();
        if
        :: progress -> progress = false
        :: !progress && running && !stalled ->
          d_step {
#ifndef DECIDES_LATE
            in_step = (doing == ATTENDING);
            doing = GIVEN_UP;
#endif
            stalled = true
          };
          cancelled = true;
#ifndef GUARD_FORGETS
          release_all(i);
#else
          released = true;
#endif
          notify_changed()
        :: else
        fi
      fi
    :: else ->
      d_step { guard_wakes = NEVER; guard_sleeps = true; unlock() };
      !guard_sleeps;
      lock()
    fi
#else
    d_step { guard_wakes = NEVER; guard_sleeps = true; unlock() };
    !guard_sleeps;
    lock()
#endif
  od;
  unlock()
}

/* ---- the executor ---- */

inline start() {
  lock();
  assert(!running);
  d_step {
    failed = false; cancelled = false; stalled = false; doing = WAITING; progress = true;
    spoilt = false; released = false;
    i = 0;
    do
    :: i < STEPS ->
#ifndef FLAGS_STAY
      ready[i] = 0; done[i] = 0;
#endif
      i++
    :: else -> break
    od;
    i = 0;
    running = true
  };
#ifdef PATIENCE
  wakes_guard = (guard_wakes == NEVER);
#endif
  unlock();
  notify_changed();
#ifndef GUARD_SLEEPS
  if
  :: wakes_guard -> guard_sleeps = false
  :: else
  fi
#endif
}

inline sleep_on_changed() {
  d_step { unlock(); executor_sleeps = true }; !executor_sleeps; lock()
}

/* `outcome`: whether it was told that all was done. */
inline finish() {
  lock();
  do
  :: !running || stalled -> break
  :: else -> sleep_on_changed()
  od;
  if
  :: stalled ->
    if
    :: !IN_STEP ->
      do
      :: !running -> break
      :: else -> sleep_on_changed()
      od
    :: else
    fi;
    outcome = false
  :: else -> outcome = !failed && !cancelled
  fi;
  unlock()
}

/* `ended_in_time`: whether the server has ended. */
inline close(i) {
  cancel(i);
  lock();
  relay_closed = true;
  notify_changed();
  guard_sleeps = false;
  do
  :: server_ended -> break
  :: else ->
    d_step { unlock(); executor_sleeps = true };
    if
    :: !executor_sleeps; lock()
    :: d_step { executor_sleeps -> executor_sleeps = false }; lock(); break /* time has passed */
    fi
  od;
  ended_in_time = server_ended;
  unlock()
}

inline settle() {
#ifdef NOT_SETTLED
  skip
#else
  atomic { !launching && IDLE }
#endif
}

proctype Executor() {
  byte i;
  bool outcome, wakes_guard, ended_in_time;
  do
  :: iteration < ITERATIONS && !closed && !gave_up ->
    d_step {
      iteration++;
      i = 0;
      do
      :: i < 3 -> placed[i] = 0; ended[i] = 0; i++
      :: else -> break
      od;
      i = 0
    };
    start();
    launching = true;
    if
    :: launch!false; atomic { !launching && ALL_ENDED }; finish()
#ifdef LAUNCH_FAILS
    :: launch!true; !launching; outcome = false
#endif
    fi;
    if
    :: outcome && !closed -> assert(!spoilt); num_done++; left = iteration
    :: else ->
      cancel(i);
      finish();
      settle();
      gave_up = stalled;
      if
      :: gave_up -> close(i)
      :: else -> ended_in_time = true
      fi;
      if
#ifdef LEAVES_LATE
      :: true -> left = iteration
#else
      :: ended_in_time -> left = iteration
      :: else /* the engine has to end */
#endif
      fi
    fi
  :: else -> break
  od;
#if !defined(CLOSES) && !defined(LAUNCH_FAILS) && !defined(STEP_FAILS) && !defined(PATIENCE)
  assert(num_done == ITERATIONS);
#endif
  /* The relay's destructor, once nobody uses it. */
  closer_ended;
  close(i)
}

#ifdef CLOSES
proctype Closer() {
  byte i;
  closed = true;
  cancel(i);
  settle();
  closer_ended = true
}
#endif

init {
  atomic {
    byte i;
    length[DEVICE] = STEPS + SUBS;
    length[TO_HOST] = 2 * STEPS;
    length[TO_DEVICE] = 2 * STEPS;
    do
    :: i < QUEUES -> run Queue(i); i++
    :: else -> break
    od;
    run Launcher();
    run Server();
    run Guard();
    run Executor();
#ifdef CLOSES
    run Closer()
#else
    closer_ended = true
#endif
  }
}
