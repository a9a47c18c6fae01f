// What keeps a server of TVM's RPC alive, run by the process that it forks for a session: the server gives up where that
// process ends with another exit code than 0, be it a kernel's crash or a client that was killed before the answer; and
// it waits for ever where the client has died while a kernel hangs.
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <string>
#include <thread>

#include <tvm/ffi/c_api.h>

#ifndef POLLRDHUP
#define POLLRDHUP 0
#endif
#define EXPORTED extern "C" __attribute__((visibility("default"))) int
#define ARGUMENTS void *, const TVMFFIAny *args, int32_t, TVMFFIAny *result

namespace {

constexpr int kMostDescriptors = 1024;

void leave(int) { _exit(0); }

// The connection with the client: of the port that the server listens on (which fork has left open here, as it has the
// connection with the tracker), or, in a process that was not forked, the only one; -1 where it is not to be told.
int client() {
  int listening = -1, found = -1, connections = 0;
  for (int pass = 0; pass < 2; ++pass) {
    for (int fd = 0; fd < kMostDescriptors; ++fd) {
      sockaddr_storage own{}, other{};
      socklen_t own_size = sizeof own, other_size = sizeof other;
      if (getsockname(fd, reinterpret_cast<sockaddr *>(&own), &own_size) != 0) continue;
      if (own.ss_family != AF_INET && own.ss_family != AF_INET6) continue;
      const int port = reinterpret_cast<sockaddr_in *>(&own)->sin_port;  // at the same place in an IPv6 address
      if (getpeername(fd, reinterpret_cast<sockaddr *>(&other), &other_size) != 0) {
        listening = port;
      } else if (pass == 1 && (listening == -1 || listening == port)) {
        found = fd;
        ++connections;
      }
    }
  }
  return connections == 1 ? found : -1;
}

int connection = -1;

// Ends this process if its client is gone.
void look(int) {
  pollfd watched{connection, POLLRDHUP, 0};
  if (poll(&watched, 1, 0) > 0) _exit(0);
}

void watch() {
  pollfd watched{connection, POLLRDHUP, 0};
  while (poll(&watched, 1, -1) <= 0) {
  }
  _exit(0);
}

// SIGIO for whatever happens to the connection: where the client is gone, it interrupts what is being run, a kernel or
// the server's own code before that has made an exit code of the error. A thread is not sure to have its turn by then.
void attend() {
  struct sigaction action{};
  action.sa_handler = look;
  action.sa_flags = SA_RESTART;
  sigaction(SIGIO, &action, nullptr);
  const int flags = fcntl(connection, F_GETFL);
  if (flags == -1 || fcntl(connection, F_SETOWN, getpid()) == -1) return;
  fcntl(connection, F_SETFL, flags | O_ASYNC);
  look(SIGIO);  // it may have been gone before
}

}  // namespace

// protect(): this process ends when its client is gone or a kernel crashes, with exit code 0.
EXPORTED __tvm_ffi_protect(ARGUMENTS) {
  (void)args;
  for (int fatal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT, SIGALRM}) signal(fatal, leave);
  connection = client();
  if (connection != -1) {
    std::thread(watch).detach();
    attend();
  }
  *result = TVMFFIAny{};
  return 0;
}

// limit(seconds): and when this function is not called again for so long.
EXPORTED __tvm_ffi_limit(ARGUMENTS) {
  const itimerval limit{{0, 0}, {static_cast<time_t>(args[0].v_int64), 0}};
  setitimer(ITIMER_REAL, &limit, nullptr);
  *result = TVMFFIAny{};
  return 0;
}

// threads(number): of TVM's thread pool, which has not run yet.
EXPORTED __tvm_ffi_threads(ARGUMENTS) {
  setenv("TVM_NUM_THREADS", std::to_string(args[0].v_int64).c_str(), 1);
  *result = TVMFFIAny{};
  return 0;
}
