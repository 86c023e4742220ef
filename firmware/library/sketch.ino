// Trains on a sensor: the serial monitor sends "t LABEL", "i" or "s" (example.h), a button at BUTTON_PIN trains class 0.
#include <Arduino.h>

#include "example.h"

static const int BUTTON_PIN = 2;
static float values[PORT_SAMPLE_VALUES];

// Put one sample of your sensor here: PORT_SAMPLE_VALUES real values, channel by channel.
static void readSensor() {
  for (unsigned i = 0; i < PORT_SAMPLE_VALUES; i++) {
    values[i] = analogRead(A0) / 1023.0f;
  }
}

static void command(const char *line) {
  char answer[64];
  readSensor();
  port_example_do(line, values, answer, sizeof answer);
  Serial.println(answer);
}

void setup() {
  Serial.begin(115200);
  pinMode(BUTTON_PIN, INPUT_PULLUP);
  if (port_library_begin(NULL) != PORT_OK) {  // give it a port_library_storage to keep what is learnt
    Serial.println("the model does not start: is -ffp-contract=off among the flags?");
  }
}

void loop() {
  static char line[32];
  static unsigned length = 0;
  if (digitalRead(BUTTON_PIN) == LOW) {
    command("t 0");
    delay(300);
  }
  while (Serial.available() > 0) {
    char next = (char)Serial.read();
    if (next == '\n' || length + 1 == sizeof line) {
      line[length] = 0;
      length = 0;
      command(line);
    } else {
      line[length++] = next;
    }
  }
}
