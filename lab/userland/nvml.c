/*
 * Stand-in NVML: answers for the cards of the simulated machine.
 *
 * The cards come from /run/vllm-turing-lab/nvml, one line a card, written at the simulated boot
 * and by the fault switches; the library never invents one. LIBRARY_VERSION is that of the package
 * it is built into, so a module of another version gives the real library's mismatch error.
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define CARDS_FILE "/run/vllm-turing-lab/nvml"
/* A copy of /proc/driver/nvidia/version: a sandboxed unit has a fresh /proc without our folder. */
#define MODULE_FILE "/run/vllm-turing-lab/driver-version"
#define MAX_CARDS 8
#define MAX_LINKS 6
#define MIB (1024ULL * 1024ULL)

enum {
	SUCCESS = 0,
	UNINITIALIZED = 1,
	INVALID_ARGUMENT = 2,
	NOT_SUPPORTED = 3,
	NOT_FOUND = 6,
	DRIVER_NOT_LOADED = 9,
	GPU_IS_LOST = 15,
	LIB_RM_VERSION_MISMATCH = 18,
};

struct card {
	unsigned int index;
	char bus_id[32];
	char uuid[96];
	int major, minor;
	unsigned long long memory_mib, used_mib;
	unsigned int power_mw, min_mw, max_mw;
	unsigned int pci_device;
	unsigned int links;
	int usable;
	char name[96];
};

typedef int result_t;
typedef struct card *device_t;

struct memory {
	unsigned long long total, free, used;
};

struct memory_v2 {
	unsigned int version;
	unsigned long long total, reserved, free, used;
};

struct pci_info {
	char bus_id_legacy[16];
	unsigned int domain, bus, device, pci_device_id, pci_subsystem_id;
	char bus_id[32];
};

static struct card cards[MAX_CARDS];
static unsigned int card_count;
static int initialized;

/* Version of the loaded module: the first word that starts with a digit and holds a dot. */
static int module_version(char *version, size_t size)
{
	char line[256], *word, *rest;
	FILE *file = fopen(MODULE_FILE, "re");

	if (!file)
		return 0;
	version[0] = 0;
	if (fgets(line, sizeof(line), file)) {
		for (word = strtok_r(line, " \n", &rest); word; word = strtok_r(NULL, " \n", &rest)) {
			if (word[0] >= '0' && word[0] <= '9' && strchr(word, '.')) {
				snprintf(version, size, "%s", word);
				break;
			}
		}
	}
	fclose(file);
	return version[0] != 0;
}

static result_t load(void)
{
	char line[512], version[64];
	FILE *file;

	card_count = 0;
	if (!module_version(version, sizeof(version)))
		return DRIVER_NOT_LOADED;
	if (strcmp(version, LIBRARY_VERSION) != 0)
		return LIB_RM_VERSION_MISMATCH;
	file = fopen(CARDS_FILE, "re");
	if (!file)
		return DRIVER_NOT_LOADED;
	while (card_count < MAX_CARDS && fgets(line, sizeof(line), file)) {
		struct card *c = &cards[card_count];

		if (strcmp(line, "hang\n") == 0)
			for (;;)
				pause();
		memset(c, 0, sizeof(*c));
		if (sscanf(line, "%u %31s %95s %d.%d %llu %llu %u %u %u %x %u %d %95[^\n]", &c->index,
			   c->bus_id, c->uuid, &c->major, &c->minor, &c->memory_mib, &c->used_mib,
			   &c->power_mw, &c->min_mw, &c->max_mw, &c->pci_device, &c->links,
			   &c->usable, c->name) == 14)
			card_count++;
	}
	fclose(file);
	return SUCCESS;
}

static result_t text(char *target, unsigned int size, const char *value)
{
	if (!target || size <= strlen(value))
		return INVALID_ARGUMENT;
	snprintf(target, size, "%s", value);
	return SUCCESS;
}

static result_t checked(device_t device)
{
	if (!initialized)
		return UNINITIALIZED;
	if (!device)
		return INVALID_ARGUMENT;
	return device->usable ? SUCCESS : GPU_IS_LOST;
}

#define DEVICE(device) \
	do { \
		result_t state = checked(device); \
		if (state != SUCCESS) \
			return state; \
	} while (0)

result_t nvmlInitWithFlags(unsigned int flags)
{
	result_t state = load();

	(void)flags;
	initialized = state == SUCCESS;
	return state;
}

result_t nvmlInit_v2(void)
{
	return nvmlInitWithFlags(0);
}

result_t nvmlInit(void)
{
	return nvmlInitWithFlags(0);
}

result_t nvmlShutdown(void)
{
	initialized = 0;
	return SUCCESS;
}

const char *nvmlErrorString(result_t result)
{
	switch (result) {
	case SUCCESS:
		return "Success";
	case UNINITIALIZED:
		return "Uninitialized";
	case INVALID_ARGUMENT:
		return "Invalid Argument";
	case NOT_SUPPORTED:
		return "Not Supported";
	case NOT_FOUND:
		return "Not Found";
	case DRIVER_NOT_LOADED:
		return "Driver Not Loaded";
	case GPU_IS_LOST:
		return "GPU is lost";
	case LIB_RM_VERSION_MISMATCH:
		return "Driver/library version mismatch";
	default:
		return "Unknown Error";
	}
}

result_t nvmlSystemGetDriverVersion(char *version, unsigned int size)
{
	char loaded[64];

	return module_version(loaded, sizeof(loaded)) ? text(version, size, loaded) :
							DRIVER_NOT_LOADED;
}

result_t nvmlSystemGetNVMLVersion(char *version, unsigned int size)
{
	return text(version, size, "13." LIBRARY_VERSION);
}

result_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
	*version = 13000;
	return SUCCESS;
}

result_t nvmlSystemGetCudaDriverVersion(int *version)
{
	return nvmlSystemGetCudaDriverVersion_v2(version);
}

result_t nvmlDeviceGetCount_v2(unsigned int *count)
{
	if (!initialized)
		return UNINITIALIZED;
	*count = card_count;
	return SUCCESS;
}

result_t nvmlDeviceGetCount(unsigned int *count)
{
	return nvmlDeviceGetCount_v2(count);
}

result_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, device_t *device)
{
	if (!initialized)
		return UNINITIALIZED;
	if (index >= card_count)
		return INVALID_ARGUMENT;
	*device = &cards[index];
	return checked(*device);
}

result_t nvmlDeviceGetHandleByIndex(unsigned int index, device_t *device)
{
	return nvmlDeviceGetHandleByIndex_v2(index, device);
}

result_t nvmlDeviceGetHandleByUUID(const char *uuid, device_t *device)
{
	for (unsigned int i = 0; initialized && i < card_count; i++) {
		if (strcmp(cards[i].uuid, uuid) == 0) {
			*device = &cards[i];
			return checked(*device);
		}
	}
	return initialized ? NOT_FOUND : UNINITIALIZED;
}

result_t nvmlDeviceGetIndex(device_t device, unsigned int *index)
{
	DEVICE(device);
	*index = device->index;
	return SUCCESS;
}

result_t nvmlDeviceGetName(device_t device, char *name, unsigned int size)
{
	DEVICE(device);
	return text(name, size, device->name);
}

result_t nvmlDeviceGetUUID(device_t device, char *uuid, unsigned int size)
{
	DEVICE(device);
	return text(uuid, size, device->uuid);
}

result_t nvmlDeviceGetCudaComputeCapability(device_t device, int *major, int *minor)
{
	DEVICE(device);
	*major = device->major;
	*minor = device->minor;
	return SUCCESS;
}

result_t nvmlDeviceGetMemoryInfo(device_t device, struct memory *memory)
{
	DEVICE(device);
	memory->total = device->memory_mib * MIB;
	memory->used = device->used_mib * MIB;
	memory->free = memory->total - memory->used;
	return SUCCESS;
}

result_t nvmlDeviceGetMemoryInfo_v2(device_t device, struct memory_v2 *memory)
{
	DEVICE(device);
	memory->total = device->memory_mib * MIB;
	memory->reserved = 0;
	memory->used = device->used_mib * MIB;
	memory->free = memory->total - memory->used;
	return SUCCESS;
}

result_t nvmlDeviceGetPciInfo_v3(device_t device, struct pci_info *pci)
{
	unsigned int domain, bus, slot;

	DEVICE(device);
	memset(pci, 0, sizeof(*pci));
	if (sscanf(device->bus_id, "%x:%x:%x", &domain, &bus, &slot) != 3)
		return NOT_FOUND;
	pci->domain = domain;
	pci->bus = bus;
	pci->device = slot;
	pci->pci_device_id = device->pci_device << 16 | 0x10de;
	snprintf(pci->bus_id, sizeof(pci->bus_id), "%s", device->bus_id);
	snprintf(pci->bus_id_legacy, sizeof(pci->bus_id_legacy), "%.12s", device->bus_id + 4);
	return SUCCESS;
}

result_t nvmlDeviceGetPowerManagementLimit(device_t device, unsigned int *milliwatts)
{
	DEVICE(device);
	*milliwatts = device->power_mw;
	return SUCCESS;
}

result_t nvmlDeviceGetEnforcedPowerLimit(device_t device, unsigned int *milliwatts)
{
	return nvmlDeviceGetPowerManagementLimit(device, milliwatts);
}

result_t nvmlDeviceGetPowerManagementLimitConstraints(device_t device, unsigned int *low,
						      unsigned int *high)
{
	DEVICE(device);
	*low = device->min_mw;
	*high = device->max_mw;
	return SUCCESS;
}

result_t nvmlDeviceGetNvLinkState(device_t device, unsigned int link, unsigned int *active)
{
	DEVICE(device);
	if (link >= MAX_LINKS)
		return INVALID_ARGUMENT;
	*active = link < device->links;
	return SUCCESS;
}

/* NVML_P2P_STATUS_OK is 0, NVML_P2P_STATUS_NOT_SUPPORTED is 5. */
result_t nvmlDeviceGetP2PStatus(device_t one, device_t other, int capability, int *status)
{
	(void)capability;
	DEVICE(one);
	DEVICE(other);
	*status = one->links && other->links ? 0 : 5;
	return SUCCESS;
}

result_t nvmlDeviceGetNumaNodeId(device_t device, unsigned int *node)
{
	DEVICE(device);
	*node = 0;
	return SUCCESS;
}

result_t nvmlDeviceGetCpuAffinity(device_t device, unsigned int size, unsigned long *set)
{
	DEVICE(device);
	for (unsigned int i = 0; i < size; i++)
		set[i] = i ? 0 : 0xffff;
	return SUCCESS;
}
