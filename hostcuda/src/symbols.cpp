#include "symbols.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace hostcuda {
namespace {

// dladdr knows exported symbols only; kernels in anonymous namespaces and keys of shared arrays are local. They stand in the executable
// file's own symbol table. Runs once per name, so the file is mapped and searched each time.
std::string local_symbol(uintptr_t offset) {
    std::string name;
    const int file = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    if (file < 0) return name;
    struct stat status;
    if (fstat(file, &status) == 0 && static_cast<size_t>(status.st_size) > sizeof(ElfW(Ehdr))) {
        const size_t bytes = static_cast<size_t>(status.st_size);
        void* const mapped = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file, 0);
        if (mapped != MAP_FAILED) {
            const char* const image = static_cast<const char*>(mapped);
            const auto& header = *reinterpret_cast<const ElfW(Ehdr)*>(image);
            const auto* const sections = reinterpret_cast<const ElfW(Shdr)*>(image + header.e_shoff);
            for (int i = 0; header.e_shoff != 0 && i < header.e_shnum && name.empty(); i++) {
                if (sections[i].sh_type != SHT_SYMTAB) continue;
                const auto* const symbols = reinterpret_cast<const ElfW(Sym)*>(image + sections[i].sh_offset);
                const char* const strings = image + sections[sections[i].sh_link].sh_offset;
                for (size_t s = 0; s < sections[i].sh_size / sizeof(ElfW(Sym)); s++) {
                    const int type = symbols[s].st_info & 15;
                    if (symbols[s].st_value != offset || (type != STT_FUNC && type != STT_OBJECT)) continue;
                    name = strings + symbols[s].st_name;
                    break;
                }
            }
            munmap(mapped, bytes);
        }
    }
    close(file);
    return name;
}

}  // namespace

void symbol_name(const void* address, char* text, size_t size) {
    Dl_info info{};
    std::string name;
    if (dladdr(address, &info) != 0) {
        if (info.dli_sname != nullptr && info.dli_saddr == address) {
            name = info.dli_sname;
        } else {
            // Symbol values in a position-independent executable count from where it is loaded, in others from zero.
            const auto base = reinterpret_cast<uintptr_t>(info.dli_fbase);
            const bool relocated = reinterpret_cast<const ElfW(Ehdr)*>(info.dli_fbase)->e_type == ET_DYN;
            name = local_symbol(reinterpret_cast<uintptr_t>(address) - (relocated ? base : 0));
        }
    }
    if (name.empty()) {
        snprintf(text, size, "0x%zx", reinterpret_cast<size_t>(address));
        return;
    }
    int status = 0;
    char* const demangled = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
    snprintf(text, size, "%s", status == 0 ? demangled : name.c_str());
    free(demangled);
}

}  // namespace hostcuda
