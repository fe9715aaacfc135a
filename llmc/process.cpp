#include "llmc/process.h"

#include <mpi.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>

namespace {

// Every message of a failing rank in one write, so that lines of several ranks do not mix.
void print_error(const std::string& text) {
    const std::string line = text + "\n";
    if (write(STDERR_FILENO, line.data(), line.size()) < 0) return;
}

// Whether a launcher says so: OpenMPI's mpirun, or Slurm and others by way of PMI or PMIx.
bool started_by_launcher() {
    for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK"}) {
        if (getenv(name)) return true;
    }
    return false;
}

// Where this process is, but for its rank.
void fill_place(Process* process) {
    char host[256] = "";
    gethostname(host, sizeof(host) - 1);
    process->host = host;
    process->pid = static_cast<int>(getpid());
}

}  // namespace

Process start_processes(int* argc, char*** argv) {
    int provided = 0;
    if (MPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, &provided) != MPI_SUCCESS) fail("MPI_Init_thread failed; is this MPI the one mpirun belongs to?");
    CHECK(provided == MPI_THREAD_MULTIPLE,
          "this MPI offers thread level %d, but MPI_THREAD_MULTIPLE (%d) is needed; use an OpenMPI built with thread support", provided, MPI_THREAD_MULTIPLE);
    Process process;
    MPI_Comm_rank(MPI_COMM_WORLD, &process.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &process.ranks);
    MPI_Comm local;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, process.rank, MPI_INFO_NULL, &local);
    MPI_Comm_rank(local, &process.local_rank);
    MPI_Comm_size(local, &process.local_ranks);
    MPI_Comm_free(&local);
    fill_place(&process);
    return process;
}

void finish_processes() {
    // mpirun may stop forwarding a rank's output once that rank has finalised.
    fflush(stdout);
    int started = 0;
    MPI_Initialized(&started);
    if (started) MPI_Finalize();
}

std::vector<std::string> gather_texts(const Process& process, const std::string& text) {
    if (process.ranks == 1) return {text};
    int length = static_cast<int>(text.size());
    std::vector<int> lengths(process.ranks), starts(process.ranks, 0);
    MPI_Allgather(&length, 1, MPI_INT, lengths.data(), 1, MPI_INT, MPI_COMM_WORLD);
    int total = 0;
    for (int rank = 0; rank < process.ranks; ++rank) {
        starts[rank] = total;
        total += lengths[rank];
    }
    std::string all(total, '\0');
    MPI_Allgatherv(text.data(), length, MPI_CHAR, all.data(), lengths.data(), starts.data(), MPI_CHAR, MPI_COMM_WORLD);
    std::vector<std::string> texts;
    for (int rank = 0; rank < process.ranks; ++rank) texts.push_back(all.substr(starts[rank], lengths[rank]));
    return texts;
}

void check_places_differ(const std::vector<std::string>& places) {
    for (size_t rank = 0; rank < places.size(); ++rank) {
        for (size_t earlier = 0; earlier < rank; ++earlier) {
            CHECK(places[rank] != places[earlier],
                  "ranks %zu and %zu would share one GPU (%s), which NCCL cannot do: start at most one rank a GPU (mpirun -np), or look at CUDA_VISIBLE_DEVICES; for a test of several "
                  "ranks on one GPU build with make NCCL=mpi", earlier, rank, places[rank].c_str());
        }
    }
}

void broadcast_bytes(const Process& process, std::vector<unsigned char>* bytes) {
    if (process.ranks == 1) return;
    unsigned long long count = bytes->size();
    MPI_Bcast(&count, 1, MPI_UNSIGNED_LONG_LONG, 0, MPI_COMM_WORLD);
    bytes->resize(count);
    MPI_Bcast(bytes->data(), narrow_int(count, "the number of broadcast bytes"), MPI_BYTE, 0, MPI_COMM_WORLD);
}

void run_on_all_ranks(const Process& process, const std::function<void()>& body) {
    // One byte of status before the message: 0 fine, else the exit status to end with.
    std::string report(1, '\0');
    try {
        body();
    } catch (const UsageError& error) {
        report = std::string(1, '\2') + error.what();
    } catch (const std::exception& error) {
        report = std::string(1, '\1') + error.what();
    }
    const std::vector<std::string> reports = gather_texts(process, report);
    int first = -1, others = 0;
    for (int rank = 0; rank < process.ranks; ++rank) {
        if (reports[rank][0] == '\0') continue;
        if (first < 0) {
            first = rank;
        } else {
            ++others;
        }
    }
    if (first < 0) return;
    std::string message = reports[first].substr(1);
    if (process.ranks > 1) {
        message = others == process.ranks - 1 ? message : "rank " + std::to_string(first) + ": " + message;
        if (others > 0 && others < process.ranks - 1) message += " (and " + std::to_string(others) + " more ranks failed)";
    }
    throw AgreedError(message, reports[first][0]);
}

namespace {
volatile sig_atomic_t stop_signal_came = 0;
}

void remember_stop_signal() {
    struct sigaction action = {};
    action.sa_handler = [](int) { stop_signal_came = 1; };
    action.sa_flags = SA_RESTART;  // no read or write of ours is cut short by it
    sigaction(SIGUSR1, &action, nullptr);
}

bool stop_requested() { return stop_signal_came != 0; }

int run_main(int argc, char** argv, const std::function<int(const Process&)>& body, bool alone) {
    Process process;
    try {
        if (alone && !started_by_launcher()) {
            fill_place(&process);
        } else {
            process = start_processes(&argc, &argv);
        }
        const int status = body(process);
        finish_processes();
        return status;
    } catch (const AgreedError& error) {
        if (process.rank == 0) print_error(std::string("error: ") + error.what());
        finish_processes();
        return error.exit_status;
    } catch (const std::exception& error) {
        print_error("error on rank " + std::to_string(process.rank) + " (" + process.host + ", pid " + std::to_string(process.pid) + "): " + error.what());
        if (process.ranks > 1) MPI_Abort(MPI_COMM_WORLD, 1);
        _exit(1);
    }
}
