// The loop that BitTrain packs and unpacks with (arXiv 2110.15362, section 3): an item at a time, a growing vector of values beside one of bits.
#include <cstddef>
#include <cstring>
#include <vector>

namespace {
std::vector<float> values;
std::vector<bool> bitmap;
}

extern "C" void loop_pack(const float *items, std::size_t count) {
    values.clear(), bitmap.clear();
    values.shrink_to_fit(), bitmap.shrink_to_fit();
    std::vector<float> copy(items, items + count);
    for (float item : copy) {
        if (item != 0)
            values.push_back(item);
        bitmap.push_back(item != 0);
    }
}

extern "C" void loop_unpack(float *items) {
    std::vector<float> made;
    std::size_t next = 0;
    for (bool there : bitmap)
        made.push_back(there ? values[next++] : 0.0f);
    std::memcpy(items, made.data(), made.size() * sizeof(float));
}
