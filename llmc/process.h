// The processes of a run: MPI start-up, who is where, and errors that all ranks agree on. Host compiler only needs MPI.
//
// A run ends in one of three ways. Done: every rank returns 0. An error found at start-up: run_on_all_ranks() spreads the first one (lowest rank)
// to everybody, rank 0 prints it, all return 1 (2 for usage). An error on one rank in the middle of a step: that rank prints it and takes
// the job down with MPI_Abort, since its peers may be waiting inside a collective.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "llmc/error.h"

struct Process {
    int rank = 0, ranks = 1;              // in the whole job
    int local_rank = 0, local_ranks = 1;  // on this host
    std::string host;
    int pid = 0;
};

// An error every rank knows and throws: the message already names the rank it came from.
struct AgreedError : Error {
    AgreedError(const std::string& message, int exit_status) : Error(message), exit_status(exit_status) {}
    int exit_status;
};

// MPI_Init_thread with MPI_THREAD_MULTIPLE (checked), and where this rank is.
Process start_processes(int* argc, char*** argv);

// MPI_Finalize. After it only return from main.
void finish_processes();

// Collective: runs `body` on this rank; if it threw on any rank, all ranks throw the lowest rank's message as an AgreedError.
void run_on_all_ranks(const Process& process, const std::function<void()>& body);

// Collective: the same text from every rank, in rank order (short strings; for the start-up table).
std::vector<std::string> gather_texts(const Process& process, const std::string& text);

// Throws Error where two ranks sit on the same place (host and device, one text a rank), naming both and the fix.
void check_places_differ(const std::vector<std::string>& places);

// Collective: rank 0's bytes on every rank.
void broadcast_bytes(const Process& process, std::vector<unsigned char>* bytes);

// From now on SIGUSR1 (mpirun forwards it to every rank, Slurm sends it before a time limit) does not end this process but is remembered: whoever asks stop_requested() saves and ends.
void remember_stop_signal();
bool stop_requested();

// Runs the body of main(): turns exceptions into messages and exit statuses as described above. `alone`: where no launcher started this process it is rank 0 of 1 without MPI;
// such a body may use what is declared here, and no communicator.
int run_main(int argc, char** argv, const std::function<int(const Process&)>& body, bool alone = false);
