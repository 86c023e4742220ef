"""A classifier of skorch's, fitted and scored in a grid search of scikit-learn's."""

import numpy as np
import torch
from sklearn.model_selection import GridSearchCV
from skorch import NeuralNetClassifier
from torch import nn

torch.manual_seed(0)
generator = np.random.default_rng(0)
rows = generator.standard_normal((400, 64)).astype(np.float32)
classes = (rows[:, :8].sum(1) > 0).astype(np.int64)
network = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Dropout(), nn.Linear(512, 2))
net = NeuralNetClassifier(network, criterion=nn.CrossEntropyLoss, optimizer=torch.optim.Adam, max_epochs=3, verbose=0)
search = GridSearchCV(net, {"lr": [0.01, 0.001]}, cv=2, scoring="accuracy")
search.fit(rows, classes)
print(search.best_params_, search.best_score_, [row["train_loss"] for row in search.best_estimator_.history])
search.best_estimator_.save_params(f_params="skorch.pt", f_optimizer="skorch_optimizer.pt")
