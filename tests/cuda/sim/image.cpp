#include "image.h"

#include <elf.h>

#include <cstdlib>
#include <cstring>

#include "report.h"

namespace sim {
namespace {

constexpr unsigned FATBIN = 0xBA55ED50;  // first word of a fatbin

// A cubin's kernels: the functions of its symbol table that other objects see.
CUresult read_cubin(const unsigned char *image, int capability, std::set<std::string> *kernels) {
    Elf64_Ehdr header;
    std::memcpy(&header, image, sizeof header);
    if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_machine != EM_CUDA) return CUDA_ERROR_INVALID_IMAGE;
    // The architecture is the lowest byte of the flags, and the second one in cubins of CUDA 13.
    const unsigned low = header.e_flags & 0xff, second = header.e_flags >> 8 & 0xff;
    if (low != static_cast<unsigned>(capability) && second != static_cast<unsigned>(capability))
        return CUDA_ERROR_NO_BINARY_FOR_GPU;
    const auto section = [&](unsigned index) {
        Elf64_Shdr found;
        std::memcpy(&found, image + header.e_shoff + index * header.e_shentsize, sizeof found);
        return found;
    };
    for (unsigned index = 0; index < header.e_shnum; ++index) {
        const Elf64_Shdr table = section(index);
        if (table.sh_type != SHT_SYMTAB) continue;
        const Elf64_Shdr strings = section(table.sh_link);
        for (std::size_t at = 0; at + sizeof(Elf64_Sym) <= table.sh_size; at += sizeof(Elf64_Sym)) {
            Elf64_Sym symbol;
            std::memcpy(&symbol, image + table.sh_offset + at, sizeof symbol);
            if (ELF64_ST_TYPE(symbol.st_info) == STT_FUNC && ELF64_ST_BIND(symbol.st_info) == STB_GLOBAL)
                kernels->insert(reinterpret_cast<const char *>(image + strings.sh_offset + symbol.st_name));
        }
    }
    return CUDA_SUCCESS;
}

// The kernels of PTX: what follows each ".entry".
CUresult read_ptx(const char *text, int capability, std::set<std::string> *kernels) {
    const char *target = std::strstr(text, ".target");
    const char *architecture = target ? std::strstr(target, "sm_") : nullptr;
    if (!std::strstr(text, ".version") || !architecture) return CUDA_ERROR_INVALID_IMAGE;
    if (std::atoi(architecture + 3) > capability) return CUDA_ERROR_INVALID_PTX;
    for (const char *at = text; (at = std::strstr(at, ".entry"));) {
        at += std::strlen(".entry");
        at += std::strspn(at, " \t\n\r");
        const std::size_t length = std::strcspn(at, " \t\n\r({;");
        if (length) kernels->insert(std::string(at, length));
    }
    return CUDA_SUCCESS;
}

}  // namespace

CUresult read_image(const void *image, int capability, std::set<std::string> *kernels) {
    const auto *bytes = static_cast<const unsigned char *>(image);
    unsigned first;
    std::memcpy(&first, bytes, sizeof first);
    if (first == FATBIN) {
        fault("the simulated driver reads PTX and cubins, and was given a fatbin");
        return CUDA_ERROR_INVALID_IMAGE;
    }
    if (!std::memcmp(bytes, ELFMAG, SELFMAG)) return read_cubin(bytes, capability, kernels);
    return read_ptx(static_cast<const char *>(image), capability, kernels);
}

}  // namespace sim
